//! [`RopeOps`] on the GPU.

use super::args::{Op, int};
use super::module::{Define, Unit};
use super::{Cuda, Kernel, Launch};
use crate::DType::{Bf16, F32, F64, U32};
use crate::Tensor;
use crate::ops::attention::Pages;
use crate::ops::rope::{QkNorm, QkNormGrad, RopeOps};

pub(super) static UNIT: Unit = Unit {
    stem: "rope",
    source: include_str!("../../kernels/rope.cu"),
    variants: &[&[("HEAD_DIM", 64)], &[("HEAD_DIM", 128)], &[("HEAD_DIM", 6)]],
    only: None,
};

/// Warps of a thread block, each on one (token, head) at a time.
const WARPS: usize = 8;
/// Items of a warp in the backward, so that sums over tokens stay in registers.
const ITEMS_PER_WARP: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct TableParams {
    table: u64,
    positions: u64,
    inv_freq: u64,
    num_tokens: i32,
    half: i32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    q: u64,
    slab: u64,
    refs: u64,
    qkv: u64,
    q_weight: u64,
    k_weight: u64,
    table: u64,
    num_tokens: i32,
    num_heads: i32,
    num_kv_heads: i32,
    page_tokens: i32,
    first_row: i32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    qkv: u64,
    dq: u64,
    slab: u64,
    refs: u64,
    q_weight: u64,
    k_weight: u64,
    table: u64,
    partial: u64,
    num_tokens: i32,
    num_heads: i32,
    num_kv_heads: i32,
    page_tokens: i32,
    grad_is_bf16: i32,
    items_per_warp: i32,
    eps: f32,
}

/// What q and the fused projection say of the heads.
struct Heads {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

impl Heads {
    fn of(q: &Tensor<Cuda>, qkv: &Tensor<Cuda>) -> Self {
        let [tokens, heads, dim] = q.shape() else { panic!("q is {q:?}, wanted [T, H, Dh]") };
        let all = qkv.dim(1) / dim;
        Self { tokens: *tokens, heads: *heads, kv_heads: (all - heads) / 2, dim: *dim }
    }

    fn qkv_shape(&self) -> [usize; 2] {
        [self.tokens, (self.heads + 2 * self.kv_heads) * self.dim]
    }

    fn items(&self) -> usize {
        self.tokens * (self.heads + 2 * self.kv_heads)
    }

    fn defines(&self) -> [Define; 1] {
        [("HEAD_DIM", self.dim as u32)]
    }

    /// Address of a slab, P, and the address of its page list.
    fn pages(&self, op: Op<'_>, pages: &Pages<'_, Cuda>, first_row: usize) -> (u64, usize, u64) {
        let [_, 2, kv_heads, page, dim] = *pages.slab.shape() else { panic!("{}: slab {:?}", op.name, pages.slab) };
        assert_eq!((kv_heads, dim), (self.kv_heads, self.dim), "{}: slab {:?}", op.name, pages.slab);
        let rows = first_row + self.tokens;
        assert!(first_row < page, "{}: row {first_row} is not in a page of {page}", op.name);
        assert_eq!(pages.refs.len(), rows.div_ceil(page), "{}: pages of {} tokens", op.name, self.tokens);
        (op.cuda.pointer(pages.slab), page, op.cuda.stage_pages(pages.refs))
    }

    fn norm(&self, op: Op<'_>, norm: Option<&QkNorm<'_, Cuda>>) -> (u64, u64, f32) {
        norm.map_or((0, 0, 0.0), |norm| {
            let weight = |tensor| op.at("norm weight", tensor, Bf16, &[self.dim]);
            (weight(norm.q_weight), weight(norm.k_weight), norm.eps)
        })
    }
}

impl RopeOps for Cuda {
    fn rope_table(&self, table: &mut Tensor<Self>, positions: &Tensor<Self>, inv_freq: &Tensor<Self>, scale: f32) {
        let op = self.op("rope_table");
        let (tokens, half) = (table.rows(), table.dim(1));
        let params = TableParams {
            table: op.at("table", table, F32, &[tokens, half, 2]),
            positions: op.at("positions", positions, U32, &[tokens]),
            inv_freq: op.at("inv_freq", inv_freq, F64, &[half]),
            num_tokens: int(tokens),
            half: int(half),
            scale,
        };
        let kernel = Kernel { unit: &UNIT, defines: &[("HEAD_DIM", 2 * half as u32)], name: "rope_table" };
        self.launch(op.name, &kernel, Launch::linear((tokens * half).div_ceil(256) as u64, 256), &params);
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
        let heads = Heads::of(q, qkv);
        if let Some(pages) = &pages {
            assert_eq!(pages.slab.dtype(), Bf16, "{}: slab {:?}", op.name, pages.slab);
        }
        let (slab, page, refs) = pages.map_or((0, 1, 0), |pages| heads.pages(op, &pages, first_row));
        let (q_weight, k_weight, eps) = heads.norm(op, norm.as_ref());
        let params = ForwardParams {
            q: op.at("q", q, Bf16, q.shape()),
            slab,
            refs,
            qkv: op.at("qkv", qkv, Bf16, &heads.qkv_shape()),
            q_weight,
            k_weight,
            table: op.at("table", table, F32, &[heads.tokens, heads.dim / 2, 2]),
            num_tokens: int(heads.tokens),
            num_heads: int(heads.heads),
            num_kv_heads: int(heads.kv_heads),
            page_tokens: int(page),
            first_row: int(first_row),
            eps,
        };
        let kernel = Kernel { unit: &UNIT, defines: &heads.defines(), name: "qkv_forward" };
        self.launch(op.name, &kernel, Launch::linear(heads.items().div_ceil(WARPS) as u64, 256), &params);
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
        let heads = Heads::of(dq, qkv);
        let (slab, page, refs) = heads.pages(op, &grads, 0);
        let (q_weight, k_weight, eps) = heads.norm(op, norm.as_ref().map(|(norm, _)| norm));
        let blocks = heads.items().div_ceil(WARPS * ITEMS_PER_WARP);
        let partial = if norm.is_some() { self.partial(blocks, 2 * heads.dim) } else { 0 };
        let params = BackwardParams {
            qkv: op.at("qkv", qkv, Bf16, &heads.qkv_shape()),
            dq: op.at("dq", dq, F32, dq.shape()),
            slab,
            refs,
            q_weight,
            k_weight,
            table: op.at("table", table, F32, &[heads.tokens, heads.dim / 2, 2]),
            partial,
            num_tokens: int(heads.tokens),
            num_heads: int(heads.heads),
            num_kv_heads: int(heads.kv_heads),
            page_tokens: int(page),
            grad_is_bf16: i32::from(grads.slab.dtype() == Bf16),
            items_per_warp: int(ITEMS_PER_WARP),
            eps,
        };
        let kernel = Kernel { unit: &UNIT, defines: &heads.defines(), name: "qkv_backward" };
        self.launch(op.name, &kernel, Launch::linear(blocks as u64, 256), &params);
        if let Some((_, Some(grad))) = norm {
            // Rows of the partial sums are [q, k]; adding them as one row of 2 Dh would need both gradients side by side.
            for (which, weight) in [(0, grad.dq_weight), (1, grad.dk_weight)] {
                let out = op.at("norm gradient", weight, F32, &[heads.dim]);
                self.add_partial_strided(
                    op.name,
                    out,
                    partial + (which * heads.dim * 4) as u64,
                    (blocks, 2 * heads.dim, heads.dim),
                );
            }
        }
    }
}
