//! Forward: one task per query tile and KV head walks the group's pages with an online softmax.
//!
//! It must not know other groups, only the carry they left.
//!
//! A tile is `TILE_ROWS` queries by one page: the two products are by `gemm` on one thread, the softmax between them runs
//! over rows of scores that are still in cache.

use super::{Group, Layout};
use crate::cpu::args::Half;
use crate::cpu::parallel::vectorised;
use crate::cpu::product::{Mat, MatMut, Threads, gemm};
use crate::cpu::real::{Float, Rounding};
use crate::ops::attention::Part;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of q in a tile: scores of 256 by a page of 128 are 128 KiB, in the second-level cache.
const TILE_ROWS: usize = 256;

/// What the call writes, `[T, H, Dh]`, `[T, H]`, `[T, H, Dh]`.
pub(super) struct Outputs<'a, R> {
    /// Where the part writes it.
    pub(super) o: Option<&'a mut [R]>,
    pub(super) rounding: Option<Rounding>,
    pub(super) lse: &'a mut [R],
    /// Where there are several groups.
    pub(super) carry: Option<&'a mut [R]>,
}

/// What one task writes: a slice per token.
struct Task<'a, R> {
    tokens: Range<usize>,
    head: usize,
    o: Vec<&'a mut [R]>,
    lse: Vec<&'a mut [R]>,
    carry: Vec<&'a mut [R]>,
}

pub(super) fn run<R: Float>(outputs: Outputs<'_, R>, q: &[R], group: &Group<'_, R>, scale: R, part: Part) {
    let Layout { kv_heads, ratio, head_dim, .. } = group.layout;
    let tile_tokens = (TILE_ROWS / ratio).max(1);
    let rounding = outputs.rounding.unwrap_or(Rounding::None);
    let lse = group.layout.divide(outputs.lse, tile_tokens, 1);
    let mut o = outputs.o.map(|o| group.layout.divide(o, tile_tokens, head_dim));
    let mut carry = outputs.carry.map(|carry| group.layout.divide(carry, tile_tokens, head_dim));
    let tasks: Vec<_> = lse
        .into_iter()
        .enumerate()
        .map(|(index, lse)| Task {
            tokens: group.layout.tokens(index / kv_heads, tile_tokens),
            head: index % kv_heads,
            o: o.as_mut().map(|o| std::mem::take(&mut o[index])).unwrap_or_default(),
            lse,
            carry: carry.as_mut().map(|carry| std::mem::take(&mut carry[index])).unwrap_or_default(),
        })
        .collect();
    tasks.into_par_iter().for_each(|task| {
        let mut state = match part {
            Part::Only | Part::First => State::empty(task.tokens.len() * ratio, head_dim),
            Part::Middle | Part::Last => State::resume(&task.lse, &task.carry),
        };
        attend(&mut state, q, group, scale, &task);
        state.finish();
        state.store(task, part, rounding);
    });
}

/// The online softmax of a tile: before and after a call `o` is normalised, meanwhile it is to be divided by `total`.
struct State<R> {
    /// Largest score so far of each row, or any number near it.
    top: Vec<R>,
    /// `Σ exp(s - top)` of each row.
    total: Vec<R>,
    /// `Σ exp(s - top) v`, `[rows, Dh]`.
    o: Vec<R>,
    head_dim: usize,
}

impl<R: Float> State<R> {
    fn empty(rows: usize, head_dim: usize) -> Self {
        Self { top: vec![R::NEG_INFINITY; rows], total: vec![R::ZERO; rows], o: vec![R::ZERO; rows * head_dim], head_dim }
    }

    /// A carry is a softmax over one key, whose score is its log-sum-exp and whose value is its output.
    fn resume(lse: &[&mut [R]], carry: &[&mut [R]]) -> Self {
        let top: Vec<R> = lse.iter().flat_map(|lse| lse.iter().copied()).collect();
        let total = top.iter().map(|&top| if top == R::NEG_INFINITY { R::ZERO } else { R::ONE }).collect();
        let o: Vec<R> = carry.iter().flat_map(|carry| carry.iter().copied()).collect();
        let head_dim = o.len() / top.len();
        Self { top, total, o, head_dim }
    }

    /// Turns the visible scores of a row into weights against its new largest score, and rescales what is there.
    #[inline(always)]
    fn absorb(&mut self, row: usize, scores: &mut [R]) {
        let top = largest(scores, self.top[row]);
        let total = weigh(scores, top);
        if top != self.top[row] {
            // 0 at the first key: exp of minus infinity.
            let shrink = (self.top[row] - top).exp();
            self.total[row] *= shrink;
            self.o[row * self.head_dim..][..self.head_dim].iter_mut().for_each(|o| *o *= shrink);
            self.top[row] = top;
        }
        self.total[row] += total;
    }

    /// Normalises `o`, and turns `top` into the log-sum-exp: minus infinity where nothing was visible.
    fn finish(&mut self) {
        for ((top, &total), o) in self.top.iter_mut().zip(&self.total).zip(self.o.chunks_exact_mut(self.head_dim)) {
            if total > R::ZERO {
                o.iter_mut().for_each(|o| *o /= total);
                *top += total.ln();
            }
        }
    }

    /// Writes `o`, rounded, or the carry; and the log-sum-exp.
    fn store(&self, task: Task<'_, R>, part: Part, rounding: Rounding) {
        scatter(task.lse, &self.top, Rounding::None);
        match part {
            Part::First | Part::Middle => scatter(task.carry, &self.o, Rounding::None),
            Part::Only | Part::Last => scatter(task.o, &self.o, rounding),
        }
    }
}

/// Lanes of the sum and the maximum over a row of scores: four AVX-512 registers of f32, so that four chains of additions
/// run at once. Half a row of a full page.
const LANES: usize = 64;

/// The largest of a row and of `top`. A NaN is passed over: scores hold none unless the model diverged, and then the weights do.
#[inline(always)]
fn largest<R: Float>(scores: &[R], top: R) -> R {
    let larger = |a: R, b: R| if b > a { b } else { a };
    let mut lanes = [top; LANES];
    let chunks = scores.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(top, |a, &b| larger(a, b));
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    larger(rest, halve(lanes, larger))
}

/// Turns a row of scores into `exp(s - top)`, and returns their sum.
#[inline(always)]
fn weigh<R: Float>(scores: &mut [R], top: R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let mut chunks = scores.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            chunk[lane] = (chunk[lane] - top).exp();
            lanes[lane] += chunk[lane];
        }
    }
    let mut total = halve(lanes, |a, b| a + b);
    for score in chunks.into_remainder() {
        *score = (*score - top).exp();
        total += *score;
    }
    total
}

/// Pairwise, so that the compiler may keep halving registers.
#[inline(always)]
fn halve<R: Float>(mut lanes: [R; LANES], f: impl Fn(R, R) -> R) -> R {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = f(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

/// Copies consecutive runs of `values`.
fn scatter<R: Float>(runs: Vec<&mut [R]>, mut values: &[R], rounding: Rounding) {
    for run in runs {
        let (head, rest) = values.split_at(run.len());
        run.copy_from_slice(head);
        rounding.apply(run);
        values = rest;
    }
}

/// Walks the pages.
fn attend<R: Float>(state: &mut State<R>, q: &[R], group: &Group<'_, R>, scale: R, task: &Task<'_, R>) {
    let Layout { ratio, head_dim, .. } = group.layout;
    let rows = task.tokens.len() * ratio;
    let mut tile = Vec::with_capacity(rows * head_dim);
    group.layout.gather(&mut tile, q, task.tokens.clone(), task.head, head_dim);
    let q = Mat::new(&tile, rows, head_dim);
    let mut scores = vec![R::ZERO; rows * group.paging.page_rows];
    for page in group.refs {
        let keys = group.sight.keys(page.index, task.tokens.clone());
        if keys.is_empty() {
            continue;
        }
        let num_keys = keys.len();
        let scores = &mut scores[..rows * num_keys];
        let k = Mat::new(group.rows(page.slot, Half::Keys, task.head, keys.clone()), num_keys, head_dim);
        gemm(MatMut::new(scores, rows, num_keys), R::ZERO, scale, q, k.t(), Threads::One);
        vectorised(
            #[inline(always)]
            || {
                for (row, scores) in scores.chunks_exact_mut(num_keys).enumerate() {
                    let seen = group.sight.seen(page.index, task.tokens.start + row / ratio, &keys);
                    scores[..seen.start].fill(R::ZERO);
                    scores[seen.end..].fill(R::ZERO);
                    if !seen.is_empty() {
                        state.absorb(row, &mut scores[seen]);
                    }
                }
            },
        );
        let v = Mat::new(group.rows(page.slot, Half::Values, task.head, keys), num_keys, head_dim);
        let weights = Mat::new(scores, rows, num_keys);
        gemm(MatMut::new(&mut state.o, rows, head_dim), R::ONE, R::ONE, weights, v, Threads::One);
    }
}
