//! [`RopeOps`] on the CPU.
//!
//! It must not know where pages are besides their slots.

use super::args::Kind::{Activation, Exactly, F32OrBf16};
use super::args::{Half, Op, Paging};
use super::buffer::{View, ViewMut};
use super::norm::{add_gradient, inverse_rms};
use super::parallel::{add, for_rows, for_rows_summing, vectorised};
use super::real::{Float, Rounding};
use super::{Cpu, with_real};
use crate::ops::attention::{PageRef, Pages};
use crate::ops::rope::{QkNorm, QkNormGrad, RopeOps};
use crate::{DType, Tensor};
use rayon::prelude::*;
use std::ops::Range;

impl RopeOps for Cpu {
    fn rope_table(&self, table: &mut Tensor<Self>, positions: &Tensor<Self>, inv_freq: &Tensor<Self>, scale: f32) {
        let op = self.op("rope_table");
        let (t, half) = (positions.len(), inv_freq.len());
        with_real!(self, R, {
            let mut table = op.write::<R>("table", table, Exactly(DType::F32), &[t, half, 2]);
            let positions = op.read::<u32>("positions", positions, Exactly(DType::U32), &[t]);
            let inv_freq = op.read::<f64>("inv_freq", inv_freq, Exactly(DType::F64), &[half]);
            op.enqueue(move || fill_table(table.slice(), positions.slice(), inv_freq.slice(), f64::from(scale)));
        });
    }

    fn qkv_forward(
        &self,
        q: &mut Tensor<Self>,
        pages: Option<Pages<'_, Self>>,
        first_row: usize,
        qkv: &Tensor<Self>,
        norm: Option<QkNorm<'_, Self>>,
        table: &Tensor<Self>,
    ) {
        let op = self.op("qkv_forward");
        op.require(q.shape().len() == 3, || format!("q is {q:?}, wanted [T, H, Dh]"));
        let (t, h, dh) = (q.dim(0), q.dim(1), q.dim(2));
        let heads = Heads::new(&op, qkv, h, dh);
        with_real!(self, R, {
            let mut q = op.write::<R>("q", q, Activation, &[t, h, dh]);
            let mut store = pages.map(|pages| {
                let (slab, paging) = op.write_pages::<R>("pages", &pages, Activation);
                check_pages(&op, paging, pages.refs, first_row..first_row + t, heads);
                (slab, paging, pages.refs.to_vec())
            });
            let source = Source {
                qkv: op.read::<R>("qkv", qkv, Activation, &[t, heads.width()]),
                table: op.read::<R>("table", table, Exactly(DType::F32), &[t, dh / 2, 2]),
                norm: norm.map(|norm| Norms::new(&op, &norm, dh)),
                heads,
            };
            op.enqueue(move || {
                let rounding = q.rounding();
                store_queries(q.slice(), &source, rounding);
                if let Some((slab, paging, refs)) = &mut store {
                    store_pages(slab, *paging, refs, &source, first_row);
                }
            });
        });
    }

    fn qkv_backward(
        &self,
        qkv: &mut Tensor<Self>,
        dq: &Tensor<Self>,
        grads: Pages<'_, Self>,
        norm: Option<(QkNorm<'_, Self>, Option<QkNormGrad<'_, Self>>)>,
        table: &Tensor<Self>,
    ) {
        let op = self.op("qkv_backward");
        op.require(dq.shape().len() == 3, || format!("dq is {dq:?}, wanted [T, H, Dh]"));
        let (t, h, dh) = (dq.dim(0), dq.dim(1), dq.dim(2));
        let heads = Heads::new(&op, qkv, h, dh);
        with_real!(self, R, {
            let mut qkv = op.write::<R>("qkv", qkv, Activation, &[t, heads.width()]);
            let (slab, paging) = op.read_pages::<R>("grads", &grads, F32OrBf16);
            check_pages(&op, paging, grads.refs, 0..t, heads);
            let (norm, mut norm_grads) = match norm {
                None => (None, None),
                Some((norm, grad)) => {
                    let write = |name, weight: &Tensor<Self>| op.write::<R>(name, weight, Exactly(DType::F32), &[dh]);
                    let grad = grad.map(|grad| (write("dq_weight", grad.dq_weight), write("dk_weight", grad.dk_weight)));
                    (Some(Norms::new(&op, &norm, dh)), grad)
                }
            };
            let gradients = Gradients {
                dq: op.read::<R>("dq", dq, Exactly(DType::F32), &[t, h, dh]),
                slab,
                paging,
                refs: grads.refs.to_vec(),
                table: op.read::<R>("table", table, Exactly(DType::F32), &[t, dh / 2, 2]),
                norm,
                heads,
            };
            op.enqueue(move || {
                let rounding = qkv.rounding();
                let mut dweights = vec![R::ZERO; 2 * dh];
                backward(qkv.slice(), &mut dweights, &gradients, rounding);
                if let Some((dq_weight, dk_weight)) = &mut norm_grads {
                    add(dq_weight.slice(), &dweights[..dh]);
                    add(dk_weight.slice(), &dweights[dh..]);
                }
            });
        });
    }
}

/// How a row of the fused projection is divided.
#[derive(Clone, Copy)]
struct Heads {
    /// H.
    q: usize,
    /// G.
    kv: usize,
    /// Dh.
    dim: usize,
}

impl Heads {
    fn new(op: &Op<'_>, qkv: &Tensor<Cpu>, q: usize, dim: usize) -> Self {
        let width = if qkv.shape().len() == 2 { qkv.dim(1) } else { 0 };
        let kv = (width / dim.max(1)).saturating_sub(q) / 2;
        let heads = Self { q, kv, dim };
        op.require(dim.is_multiple_of(2) && kv > 0 && heads.width() == width, || {
            format!("qkv is {qkv:?}, wanted [T, (H + 2G)·Dh] with H {q}, Dh {dim} even, G at least 1")
        });
        heads
    }

    fn width(self) -> usize {
        (self.q + 2 * self.kv) * self.dim
    }
}

fn check_pages(op: &Op<'_>, paging: Paging, refs: &[PageRef], rows: Range<usize>, heads: Heads) {
    op.require(paging.kv_heads == heads.kv && paging.head_dim == heads.dim, || {
        format!("pages have {paging:?}, the projection G {} and Dh {}", heads.kv, heads.dim)
    });
    let wanted = rows.end.div_ceil(paging.page_rows);
    op.require(rows.start < paging.page_rows, || format!("row {} is not in a page of {}", rows.start, paging.page_rows));
    op.require(refs.len() == wanted, || format!("rows {rows:?} fill {wanted} pages, got {}", refs.len()));
}

/// Weights of the norms of q and k.
struct Norms<R> {
    q_weight: View<R>,
    k_weight: View<R>,
    eps: R,
}

impl<R: Float> Norms<R> {
    fn new(op: &Op<'_>, norm: &QkNorm<'_, Cpu>, dh: usize) -> Self {
        Self {
            q_weight: op.read("q_weight", norm.q_weight, Activation, &[dh]),
            k_weight: op.read("k_weight", norm.k_weight, Activation, &[dh]),
            eps: R::from_f32(norm.eps),
        }
    }
}

fn fill_table<R: Float>(table: &mut [R], positions: &[u32], inv_freq: &[f64], scale: f64) {
    for_rows(table, 2 * inv_freq.len(), |first, table| {
        for (row, &position) in table.chunks_exact_mut(2 * inv_freq.len()).zip(&positions[first..]) {
            for (pair, &frequency) in row.chunks_exact_mut(2).zip(inv_freq) {
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                pair[0] = R::from_f64(scale * cos);
                pair[1] = R::from_f64(scale * sin);
            }
        }
    });
}

/// What [`RopeOps::qkv_forward`] reads.
struct Source<R> {
    qkv: View<R>,
    table: View<R>,
    norm: Option<Norms<R>>,
    heads: Heads,
}

impl<R: Float> Source<R> {
    /// Head `head` of row `t`, of q, then k, then v.
    #[inline(always)]
    fn head(&self, t: usize, head: usize) -> &[R] {
        &self.qkv.slice()[t * self.heads.width() + head * self.heads.dim..][..self.heads.dim]
    }

    #[inline(always)]
    fn angles(&self, t: usize) -> &[R] {
        &self.table.slice()[t * self.heads.dim..][..self.heads.dim]
    }
}

fn store_queries<R: Float>(q: &mut [R], source: &Source<R>, rounding: Rounding) {
    let Heads { q: num_heads, dim, .. } = source.heads;
    let norm = source.norm.as_ref().map(|norm| (norm.q_weight.slice(), norm.eps));
    for_rows(
        q,
        num_heads * dim,
        #[inline(always)]
        |first, q| {
            for (row, q) in q.chunks_exact_mut(num_heads * dim).enumerate() {
                for (head, q) in q.chunks_exact_mut(dim).enumerate() {
                    rotate(q, source.head(first + row, head), norm, source.angles(first + row));
                }
                rounding.apply(q);
            }
        },
    );
}

/// One task per page; rows that are not the chunk's are not touched.
fn store_pages<R: Float>(slab: &mut ViewMut<R>, paging: Paging, refs: &[PageRef], source: &Source<R>, first_row: usize) {
    let Heads { q: num_heads, kv, dim } = source.heads;
    let num_tokens = source.qkv.len() / source.heads.width();
    let norm = source.norm.as_ref().map(|norm| (norm.k_weight.slice(), norm.eps));
    let rounding = slab.rounding();
    let pages: Vec<_> = refs.iter().map(|page| paging.page(page.slot)).collect();
    slab.disjoint(&pages).into_par_iter().enumerate().for_each(|(index, page)| {
        let page_start = index * paging.page_rows;
        let first = page_start.saturating_sub(first_row);
        let rows = page_start.max(first_row) - page_start..paging.page_rows.min(first_row + num_tokens - page_start);
        let elements = rows.start * dim..rows.end * dim;
        vectorised(
            #[inline(always)]
            || {
                for head in 0..kv {
                    let keys = &mut page[paging.tile_in_page(Half::Keys, head)][elements.clone()];
                    for (row, k) in keys.chunks_exact_mut(dim).enumerate() {
                        rotate(k, source.head(first + row, num_heads + head), norm, source.angles(first + row));
                    }
                    rounding.apply(keys);
                    let values = &mut page[paging.tile_in_page(Half::Values, head)][elements.clone()];
                    for (row, v) in values.chunks_exact_mut(dim).enumerate() {
                        v.copy_from_slice(source.head(first + row, num_heads + kv + head));
                    }
                }
            },
        );
    });
}

/// `out` = x, normed where asked (weight and eps), rotated by `angles` `[Dh/2, 2]`.
#[inline(always)]
fn rotate<R: Float>(out: &mut [R], x: &[R], norm: Option<(&[R], R)>, angles: &[R]) {
    match norm {
        None => out.copy_from_slice(x),
        Some((weight, eps)) => {
            let rstd = inverse_rms(x, eps);
            for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * rstd * weight;
            }
        }
    }
    let (low, high) = out.split_at_mut(x.len() / 2);
    for ((low, high), angle) in low.iter_mut().zip(high).zip(angles.chunks_exact(2)) {
        let (cos, sin) = (angle[0], angle[1]);
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

/// The transpose of the rotation.
#[inline(always)]
fn rotate_back<R: Float>(out: &mut [R], dout: &[R], angles: &[R]) {
    let half = dout.len() / 2;
    let (low, high) = out.split_at_mut(half);
    for (d, angle) in angles.chunks_exact(2).enumerate() {
        let (cos, sin) = (angle[0], angle[1]);
        low[d] = dout[d] * cos + dout[d + half] * sin;
        high[d] = dout[d + half] * cos - dout[d] * sin;
    }
}

/// What [`RopeOps::qkv_backward`] reads.
struct Gradients<R> {
    dq: View<R>,
    slab: View<R>,
    paging: Paging,
    refs: Vec<PageRef>,
    table: View<R>,
    norm: Option<Norms<R>>,
    heads: Heads,
}

impl<R: Float> Gradients<R> {
    /// dk or dv of row `t`, KV head `head`.
    #[inline(always)]
    fn page_row(&self, t: usize, half: Half, head: usize) -> &[R] {
        let Paging { page_rows, head_dim, .. } = self.paging;
        let tile = self.paging.tile(self.refs[t / page_rows].slot, half, head);
        let start = tile.start + t % page_rows * head_dim;
        self.slab.range(start..start + head_dim)
    }
}

/// `dweights` `[2, Dh]`: of q's norm, of k's norm.
fn backward<R: Float>(qkv: &mut [R], dweights: &mut [R], gradients: &Gradients<R>, rounding: Rounding) {
    let Heads { q: num_heads, kv, dim } = gradients.heads;
    for_rows_summing(
        qkv,
        gradients.heads.width(),
        dweights,
        #[inline(always)]
        |first, rows, dweights| {
            let (dq_weight, dk_weight) = dweights.split_at_mut(dim);
            let (mut normed, mut dx) = (vec![R::ZERO; dim], vec![R::ZERO; dim]);
            for (row, qkv) in rows.chunks_exact_mut(gradients.heads.width()).enumerate() {
                let t = first + row;
                let angles = &gradients.table.slice()[t * dim..][..dim];
                for (head, x) in qkv.chunks_exact_mut(dim).enumerate() {
                    let (dout, weight, dweight) = if head < num_heads {
                        let dq = &gradients.dq.slice()[(t * num_heads + head) * dim..][..dim];
                        (dq, gradients.norm.as_ref().map(|n| (n.q_weight.slice(), n.eps)), &mut *dq_weight)
                    } else if head < num_heads + kv {
                        let dk = gradients.page_row(t, Half::Keys, head - num_heads);
                        (dk, gradients.norm.as_ref().map(|n| (n.k_weight.slice(), n.eps)), &mut *dk_weight)
                    } else {
                        x.copy_from_slice(gradients.page_row(t, Half::Values, head - num_heads - kv));
                        continue;
                    };
                    match weight {
                        None => rotate_back(x, dout, angles),
                        Some((weight, eps)) => {
                            rotate_back(&mut normed, dout, angles);
                            dx.fill(R::ZERO);
                            add_gradient(&mut dx, dweight, &normed, x, inverse_rms(x, eps), weight);
                            x.copy_from_slice(&dx);
                        }
                    }
                }
                rounding.apply(qkv);
            }
        },
    );
}
