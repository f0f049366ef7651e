//! Backward: five products per tile, with a fixed order of every sum.
//!
//! It must not know other groups or chunks.
//!
//! Pages go in waves of at most `MAX_PARTS` parts, queries in at most `MAX_PARTS` parts, and in phase i of a wave page part
//! c meets query part (c + i) mod n. No two tasks of a phase share a page or a query, so each adds to dk, dv and dq as
//! their only writer, in an order that depends on sizes alone; and dq needs no copy per thread.

use super::{Group, Layout};
use crate::cpu::args::Half;
use crate::cpu::buffer::ViewMut;
use crate::cpu::parallel::{add, vectorised};
use crate::cpu::product::{Mat, MatMut, Threads, gemm};
use crate::cpu::real::{Float, Rounding, SPLITMIX_STEP, splitmix64};
use crate::ops::attention::PageRef;
use rayon::prelude::*;
use std::ops::Range;

/// Parts of the queries, and of a wave's pages: tasks of a phase, for each KV head. More than the cores of most machines;
/// each phase ends with a barrier, so not many more.
const MAX_PARTS: usize = 16;
/// Pages of a part. Bounds what a wave holds in f32 besides the slab: 64 pages.
const MAX_PART_PAGES: usize = 4;
/// Rows of q in a tile: q, do, dq and two matrices of scores of 128 by a page of 128 are in the second-level cache.
const TILE_ROWS: usize = 128;
/// Rows of q in a part, if there are that many: fewer would make products too small.
const MIN_PART_ROWS: usize = 32;

/// What is read of the queries, and the factor on q·k.
pub(super) struct Queries<'a, R> {
    /// `[T, H, Dh]`.
    pub(super) q: &'a [R],
    /// `[T, H, Dh]`.
    pub(super) d_o: &'a [R],
    /// `[T, H]`.
    pub(super) lse: &'a [R],
    /// `[T, H]`.
    pub(super) delta: &'a [R],
    pub(super) scale: R,
}

/// The pages added to: `refs` name the indices of the group's pages.
pub(super) struct Gradients<'a, R> {
    pub(super) slab: &'a mut ViewMut<R>,
    pub(super) refs: &'a [PageRef],
    pub(super) seed: u64,
}

/// One page part meets one query part in one KV head.
struct Meeting<'a, 'b, R> {
    head: usize,
    /// First query of the part.
    first_token: usize,
    /// The queries' gradient, a slice `[H / G, Dh]` per token.
    dq: &'a mut Vec<&'b mut [R]>,
    pages: &'a [PageRef],
    /// `[pages, 2, P, Dh]`.
    dkv: &'a mut [R],
}

pub(super) fn run<R: Float>(dq: &mut [R], mut gradients: Gradients<'_, R>, queries: &Queries<'_, R>, group: &Group<'_, R>) {
    let Layout { num_tokens, kv_heads, ratio, head_dim } = group.layout;
    let part_tokens = num_tokens.div_ceil(MAX_PARTS).max(MIN_PART_ROWS.div_ceil(ratio));
    let part_pages = group.refs.len().div_ceil(MAX_PARTS).clamp(1, MAX_PART_PAGES);
    let part_elements = part_pages * 2 * group.paging.page_rows * head_dim;
    let mut dq = group.layout.divide(dq, part_tokens, head_dim);
    let num_query_parts = num_tokens.div_ceil(part_tokens);
    // [parts, G, pages of a part, 2, P, Dh]
    let mut dkv = Vec::new();
    for (wave, pages) in group.refs.chunks(MAX_PARTS * part_pages).enumerate() {
        let parts: Vec<&[PageRef]> = pages.chunks(part_pages).collect();
        dkv.clear();
        dkv.resize(parts.len() * kv_heads * part_elements, R::ZERO);
        let num_phases = parts.len().max(num_query_parts);
        for phase in 0..num_phases {
            let mut free: Vec<Option<&mut Vec<&mut [R]>>> = dq.iter_mut().map(Some).collect();
            let meeting = |(index, dkv): (usize, _)| {
                let (part, head) = (index / kv_heads, index % kv_heads);
                let query_part = (part + phase) % num_phases;
                let dq = free.get_mut(query_part * kv_heads + head)?.take().expect("no two page parts meet the same queries");
                Some(Meeting { head, first_token: query_part * part_tokens, dq, pages: parts[part], dkv })
            };
            let meetings: Vec<_> = dkv.chunks_exact_mut(part_elements).enumerate().filter_map(meeting).collect();
            meetings.into_par_iter().for_each(|meeting| meet(meeting, queries, group));
        }
        let first_page = wave * MAX_PARTS * part_pages;
        gradients.add(first_page..first_page + pages.len(), &dkv, part_pages, group);
    }
}

/// What a task needs besides its outputs.
struct Scratch<R> {
    /// `scale · q`, so that it serves the scores and dk alike. `[rows, Dh]`.
    q: Vec<R>,
    /// `[rows, Dh]`.
    d_o: Vec<R>,
    /// `[rows, Dh]`; to be multiplied by `scale`.
    dq: Vec<R>,
    lse: Vec<R>,
    delta: Vec<R>,
    /// Scores, then `p`. `[rows, keys]`.
    p: Vec<R>,
    /// `do vᵀ`, then `ds`. `[rows, keys]`.
    ds: Vec<R>,
}

impl<R: Float> Scratch<R> {
    fn new(rows: usize, head_dim: usize, page_rows: usize) -> Self {
        let (matrix, scores) = (rows * head_dim, rows * page_rows);
        let [q, d_o, dq] = [matrix; 3].map(Vec::with_capacity);
        let [lse, delta] = [rows; 2].map(Vec::with_capacity);
        Self { q, d_o, dq, lse, delta, p: vec![R::ZERO; scores], ds: vec![R::ZERO; scores] }
    }

    fn load(&mut self, queries: &Queries<'_, R>, layout: &Layout, tokens: Range<usize>, head: usize) {
        layout.gather(&mut self.q, queries.q, tokens.clone(), head, layout.head_dim);
        layout.gather(&mut self.d_o, queries.d_o, tokens.clone(), head, layout.head_dim);
        layout.gather(&mut self.lse, queries.lse, tokens.clone(), head, 1);
        layout.gather(&mut self.delta, queries.delta, tokens, head, 1);
        self.q.iter_mut().for_each(|q| *q *= queries.scale);
        self.dq.clear();
        self.dq.resize(self.q.len(), R::ZERO);
    }
}

fn meet<R: Float>(meeting: Meeting<'_, '_, R>, queries: &Queries<'_, R>, group: &Group<'_, R>) {
    let Layout { ratio, head_dim, .. } = group.layout;
    let page_rows = group.paging.page_rows;
    let tile_tokens = (TILE_ROWS / ratio).max(1).min(meeting.dq.len());
    let mut scratch = Scratch::new(tile_tokens * ratio, head_dim, page_rows);
    for (tile, dq) in meeting.dq.chunks_mut(tile_tokens).enumerate() {
        let first_token = meeting.first_token + tile * tile_tokens;
        let tokens = first_token..first_token + dq.len();
        scratch.load(queries, &group.layout, tokens.clone(), meeting.head);
        for (page, dkv) in meeting.pages.iter().zip(meeting.dkv.chunks_exact_mut(2 * page_rows * head_dim)) {
            let keys = group.sight.keys(page.index, tokens.clone());
            if !keys.is_empty() {
                multiply(&mut scratch, dkv, (*page, keys), (tokens.clone(), meeting.head), group);
            }
        }
        for (dq, added) in dq.iter_mut().zip(scratch.dq.chunks_exact(ratio * head_dim)) {
            for (dq, &added) in dq.iter_mut().zip(added) {
                *dq += queries.scale * added;
            }
        }
    }
}

/// Adds what the queries `tokens` of one KV head and the rows `keys` of a page give to each other.
fn multiply<R: Float>(
    scratch: &mut Scratch<R>,
    dkv: &mut [R],
    (page, keys): (PageRef, Range<usize>),
    (tokens, head): (Range<usize>, usize),
    group: &Group<'_, R>,
) {
    let Layout { ratio, head_dim, .. } = group.layout;
    let (rows, num_keys) = (tokens.len() * ratio, keys.len());
    let k = Mat::new(group.rows(page.slot, Half::Keys, head, keys.clone()), num_keys, head_dim);
    let v = Mat::new(group.rows(page.slot, Half::Values, head, keys.clone()), num_keys, head_dim);
    let (q, d_o) = (Mat::new(&scratch.q, rows, head_dim), Mat::new(&scratch.d_o, rows, head_dim));
    let (p, ds) = (&mut scratch.p[..rows * num_keys], &mut scratch.ds[..rows * num_keys]);
    gemm(MatMut::new(p, rows, num_keys), R::ZERO, R::ONE, q, k.t(), Threads::One);
    gemm(MatMut::new(ds, rows, num_keys), R::ZERO, R::ONE, d_o, v.t(), Threads::One);
    vectorised(
        #[inline(always)]
        || {
            let sums = scratch.lse.iter().zip(&scratch.delta);
            let scores = p.chunks_exact_mut(num_keys).zip(ds.chunks_exact_mut(num_keys));
            for (row, ((p, ds), (&lse, &delta))) in scores.zip(sums).enumerate() {
                let mut seen = group.sight.seen(page.index, tokens.start + row / ratio, &keys);
                if lse == R::NEG_INFINITY {
                    // A query that saw nothing has no gradient.
                    seen = 0..0;
                }
                for hidden in [0..seen.start, seen.end..num_keys] {
                    p[hidden.clone()].fill(R::ZERO);
                    ds[hidden].fill(R::ZERO);
                }
                for (p, ds) in p[seen.clone()].iter_mut().zip(&mut ds[seen]) {
                    *p = (*p - lse).exp();
                    *ds = *p * (*ds - delta);
                }
            }
        },
    );
    let (dk, dv) = dkv.split_at_mut(group.paging.page_rows * head_dim);
    let dk = MatMut::new(&mut dk[keys.start * head_dim..keys.end * head_dim], num_keys, head_dim);
    let dv = MatMut::new(&mut dv[keys.start * head_dim..keys.end * head_dim], num_keys, head_dim);
    let (p, ds) = (Mat::new(p, rows, num_keys), Mat::new(ds, rows, num_keys));
    gemm(dv, R::ONE, R::ONE, p.t(), d_o, Threads::One);
    gemm(dk, R::ONE, R::ONE, ds.t(), q, Threads::One);
    gemm(MatMut::new(&mut scratch.dq, rows, head_dim), R::ONE, R::ONE, ds, k, Threads::One);
}

impl<R: Float> Gradients<'_, R> {
    /// Adds a wave's sums `[parts, G, part_pages, 2, P, Dh]` to its pages `which`, rounding once.
    fn add(&mut self, which: Range<usize>, dkv: &[R], part_pages: usize, group: &Group<'_, R>) {
        let (paging, seed, rounding) = (group.paging, self.seed, self.slab.rounding());
        let tile_elements = paging.page_rows * paging.head_dim;
        let refs = &self.refs[which];
        let pages: Vec<_> = refs.iter().map(|page| paging.page(page.slot)).collect();
        self.slab.disjoint(&pages).into_par_iter().zip(refs).enumerate().for_each(|(index, (page, page_ref))| {
            let keys = group.sight.keys(page_ref.index, 0..group.layout.num_tokens);
            for (head, half) in (0..paging.kv_heads).flat_map(|head| [(head, Half::Keys), (head, Half::Values)]) {
                let in_part = (index / part_pages * paging.kv_heads + head) * part_pages + index % part_pages;
                let term = &dkv[(2 * in_part + half as usize) * tile_elements..][..tile_elements];
                let term = &term[keys.start * paging.head_dim..keys.end * paging.head_dim];
                let start = paging.tile_in_page(half, head).start + keys.start * paging.head_dim;
                let total = &mut page[start..start + term.len()];
                let first_element = page_ref.index as u64 * paging.page(0).len() as u64 + start as u64;
                vectorised(
                    #[inline(always)]
                    || match rounding {
                        Rounding::None => add(total, term),
                        Rounding::Bf16 => add_rounding(total, term, seed, first_element),
                    },
                );
            }
        });
    }
}

/// `total += term`, rounded to one of the two nearest bf16 by the random number of each element's place in the sequence.
#[inline(always)]
fn add_rounding<R: Float>(total: &mut [R], term: &[R], seed: u64, first_element: u64) {
    for (element, (total, &term)) in (first_element + 1..).zip(total.iter_mut().zip(term)) {
        let random = splitmix64(seed.wrapping_add(element.wrapping_mul(SPLITMIX_STEP)));
        *total = (*total + term).to_bf16_stochastic(random);
    }
}
