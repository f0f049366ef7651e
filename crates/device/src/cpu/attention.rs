//! [`AttentionOps`] on the CPU: checks, and the geometry that forward and backward share.
//!
//! It must not know where pages come from or who else reads them.

mod backward;
mod forward;

use super::args::Kind::{Activation, Exactly, F32OrBf16};
use super::args::{Half, Op, Paging};
use super::buffer::View;
use super::parallel::{for_runs, sum3, task_rows};
use super::real::Float;
use super::{Cpu, with_real};
use crate::ops::attention::{AttentionBackward, AttentionOps, Mask, PageRef, Pages, Part};
use crate::{DType, Tensor};
use std::ops::Range;

impl AttentionOps for Cpu {
    fn attention_forward(
        &self,
        o: &mut Tensor<Self>,
        lse: &mut Tensor<Self>,
        carry: &mut Tensor<Self>,
        q: &Tensor<Self>,
        kv: Pages<'_, Self>,
        mask: Mask<'_, Self>,
        part: Part,
    ) {
        let op = self.op("attention_forward");
        with_real!(self, R, {
            let (slab, paging) = op.read_pages::<R>("kv", &kv, Activation);
            let layout = Layout::new(&op, q, paging, kv.refs);
            let shape = [layout.num_tokens, layout.num_heads(), paging.head_dim];
            let writes_o = matches!(part, Part::Only | Part::Last);
            let mut o = writes_o.then(|| op.write::<R>("o", o, Activation, &shape));
            let mut lse = op.write::<R>("lse", lse, Exactly(DType::F32), &shape[..2]);
            let mut carry = (part != Part::Only).then(|| op.write::<R>("carry", carry, Exactly(DType::F32), &shape));
            let q = op.read::<R>("q", q, Activation, &shape);
            let first = op.read::<u32>("mask.first", mask.first, Exactly(DType::U32), &shape[..1]);
            let (refs, start, scale) = (kv.refs.to_vec(), mask.start, R::from_f32(mask.scale));
            op.enqueue(move || {
                let sight = Sight::new(first.slice(), start, paging.page_rows);
                let group = Group { slab: &slab, paging, refs: &sight.visible(&refs), sight, layout };
                let outputs = forward::Outputs {
                    rounding: o.as_ref().map(|o| o.rounding()),
                    o: o.as_mut().map(|o| o.slice()),
                    lse: lse.slice(),
                    carry: carry.as_mut().map(|carry| carry.slice()),
                };
                forward::run(outputs, q.slice(), &group, scale, part);
            });
        });
    }

    fn attention_delta(&self, delta: &mut Tensor<Self>, o: &Tensor<Self>, d_o: &Tensor<Self>) {
        let op = self.op("attention_delta");
        op.require(o.shape().len() == 3, || format!("o is {o:?}, wanted [T, H, Dh]"));
        let (shape, head_dim) = (o.shape(), o.dim(2));
        with_real!(self, R, {
            let mut delta = op.write::<R>("delta", delta, Exactly(DType::F32), &shape[..2]);
            let o = op.read::<R>("o", o, Activation, shape);
            let d_o = op.read::<R>("d_o", d_o, Activation, shape);
            op.enqueue(move || {
                for_runs(
                    delta.slice(),
                    1,
                    task_rows(head_dim),
                    #[inline(always)]
                    |row, delta| {
                        let o = o.slice()[row * head_dim..].chunks_exact(head_dim);
                        let d_o = d_o.slice()[row * head_dim..].chunks_exact(head_dim);
                        for ((delta, o), d_o) in delta.iter_mut().zip(o).zip(d_o) {
                            *delta = sum3(
                                o,
                                d_o,
                                o,
                                #[inline(always)]
                                |o, d_o, _| o * d_o,
                            );
                        }
                    },
                );
            });
        });
    }

    fn attention_backward(&self, dq: &mut Tensor<Self>, dkv: Pages<'_, Self>, args: AttentionBackward<'_, Self>) {
        let op = self.op("attention_backward");
        let AttentionBackward { q, kv, d_o, lse, delta, mask, seed } = args;
        with_real!(self, R, {
            let (slab, paging) = op.read_pages::<R>("kv", &kv, Activation);
            let (mut gradient_slab, gradient_paging) = op.write_pages::<R>("dkv", &dkv, F32OrBf16);
            let layout = Layout::new(&op, q, paging, kv.refs);
            check_gradient_pages(&op, (gradient_paging, dkv.refs), (paging, kv.refs));
            let shape = [layout.num_tokens, layout.num_heads(), paging.head_dim];
            let mut dq = op.write::<R>("dq", dq, Exactly(DType::F32), &shape);
            let q = op.read::<R>("q", q, Activation, &shape);
            let d_o = op.read::<R>("d_o", d_o, Activation, &shape);
            let lse = op.read::<R>("lse", lse, Exactly(DType::F32), &shape[..2]);
            let delta = op.read::<R>("delta", delta, Exactly(DType::F32), &shape[..2]);
            let first = op.read::<u32>("mask.first", mask.first, Exactly(DType::U32), &shape[..1]);
            let (refs, gradient_refs) = (kv.refs.to_vec(), dkv.refs.to_vec());
            let (start, scale) = (mask.start, R::from_f32(mask.scale));
            op.enqueue(move || {
                let sight = Sight::new(first.slice(), start, paging.page_rows);
                let group = Group { slab: &slab, paging, refs: &sight.visible(&refs), sight, layout };
                let queries = backward::Queries { q: q.slice(), d_o: d_o.slice(), lse: lse.slice(), delta: delta.slice(), scale };
                let pages = backward::Gradients { slab: &mut gradient_slab, refs: &sight.visible(&gradient_refs), seed };
                backward::run(dq.slice(), pages, &queries, &group);
            });
        });
    }
}

fn check_gradient_pages(op: &Op<'_>, (gradient, gradient_refs): (Paging, &[PageRef]), (kv, kv_refs): (Paging, &[PageRef])) {
    op.require(gradient == kv, || format!("dkv has pages of {gradient:?}, kv of {kv:?}"));
    let same = gradient_refs.iter().map(|page| page.index).eq(kv_refs.iter().map(|page| page.index));
    op.require(same, || format!("dkv names the pages {gradient_refs:?}, kv {kv_refs:?}"));
}

/// How queries are divided: the H / G heads of one token that read the same KV head lie side by side, so that for a KV
/// head a run of tokens is a matrix of `tokens · ratio` rows.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// T.
    num_tokens: usize,
    /// G.
    kv_heads: usize,
    /// H / G.
    ratio: usize,
    /// Dh.
    head_dim: usize,
}

impl Layout {
    fn new(op: &Op<'_>, q: &Tensor<Cpu>, paging: Paging, refs: &[PageRef]) -> Self {
        let Paging { kv_heads, head_dim, .. } = paging;
        let fits = q.shape().len() == 3 && q.dim(1) > 0 && q.dim(1).is_multiple_of(kv_heads.max(1)) && q.dim(2) == head_dim;
        op.require(fits && kv_heads > 0, || format!("q is {q:?}, wanted [T, H, Dh] with H a multiple of G, in {paging:?}"));
        op.require(refs.is_sorted_by(|a, b| a.index < b.index), || format!("pages out of order: {refs:?}"));
        Self { num_tokens: q.dim(0), kv_heads, ratio: q.dim(1) / kv_heads, head_dim }
    }

    fn num_heads(&self) -> usize {
        self.kv_heads * self.ratio
    }

    /// Where the values of token `t` for KV head `head` lie in `[T, H, width]`: `ratio · width` of them.
    fn run(&self, t: usize, head: usize, width: usize) -> Range<usize> {
        let start = (t * self.kv_heads + head) * self.ratio * width;
        start..start + self.ratio * width
    }

    /// The values of `tokens` for KV head `head` out of `[T, H, width]`, as `tokens · ratio` rows.
    fn gather<R: Float>(&self, out: &mut Vec<R>, data: &[R], tokens: Range<usize>, head: usize, width: usize) {
        out.clear();
        tokens.for_each(|t| out.extend_from_slice(&data[self.run(t, head, width)]));
    }

    /// Divides `[T, H, width]` into what tasks may write: for run `r` of `run_tokens` tokens and KV head `g`, entry
    /// `r * G + g` has one slice `[ratio · width]` per token.
    fn divide<'a, R>(&self, data: &'a mut [R], run_tokens: usize, width: usize) -> Vec<Vec<&'a mut [R]>> {
        let num_tasks = self.num_tokens.div_ceil(run_tokens) * self.kv_heads;
        let mut tasks: Vec<Vec<&mut [R]>> = (0..num_tasks).map(|_| Vec::with_capacity(run_tokens)).collect();
        for (index, run) in data.chunks_exact_mut(self.ratio * width).enumerate() {
            let (t, head) = (index / self.kv_heads, index % self.kv_heads);
            tasks[t / run_tokens * self.kv_heads + head].push(run);
        }
        tasks
    }

    /// Run `index` of `run_tokens` tokens.
    fn tokens(&self, index: usize, run_tokens: usize) -> Range<usize> {
        index * run_tokens..((index + 1) * run_tokens).min(self.num_tokens)
    }
}

/// Who sees what.
#[derive(Clone, Copy)]
struct Sight<'a> {
    first: &'a [u32],
    start: usize,
    page_rows: usize,
}

impl<'a> Sight<'a> {
    fn new(first: &'a [u32], start: u32, page_rows: usize) -> Self {
        assert!(first.is_sorted(), "the first visible position decreases from one query to the next");
        Self { first, start: start as usize, page_rows }
    }

    /// The rows of page `index` between the first that the first of `tokens` sees and the last that the last sees. No row
    /// outside holds anything that is defined and needed.
    fn keys(&self, index: u32, tokens: Range<usize>) -> Range<usize> {
        let page = index as usize * self.page_rows;
        let first = (self.first[tokens.start] as usize).max(page) - page;
        let end = (self.start + tokens.end).clamp(page, page + self.page_rows) - page;
        first.min(end)..end
    }

    /// What query `t` sees of `keys` of page `index`, counted from the first of them.
    fn seen(&self, index: u32, t: usize, keys: &Range<usize>) -> Range<usize> {
        let seen = self.keys(index, t..t + 1);
        let clamp = |row: usize| row.clamp(keys.start, keys.end) - keys.start;
        clamp(seen.start)..clamp(seen.end)
    }

    /// The pages of which any query sees anything.
    fn visible(&self, refs: &[PageRef]) -> Vec<PageRef> {
        let seen = |page: &&PageRef| !self.first.is_empty() && !self.keys(page.index, 0..self.first.len()).is_empty();
        refs.iter().filter(seen).copied().collect()
    }
}

/// A group of pages and who attends to it.
struct Group<'a, R> {
    slab: &'a View<R>,
    paging: Paging,
    /// Those that are visible at all.
    refs: &'a [PageRef],
    sight: Sight<'a>,
    layout: Layout,
}

impl<R: Float> Group<'_, R> {
    /// Some rows `[rows, Dh]` of a page's keys or values, without touching the others.
    fn rows(&self, slot: u32, half: Half, head: usize, rows: Range<usize>) -> &[R] {
        let start = self.paging.tile(slot, half, head).start;
        let head_dim = self.paging.head_dim;
        self.slab.range(start + rows.start * head_dim..start + rows.end * head_dim)
    }
}
