//! The attention kernels of compute capability 9.0 (wgmma, tensor copies): the launches of [`attention`](super::attention) where they
//! can take a call. Same contract, same order of sums in the carry; dq, dk and dv differ from the portable kernels' by rounding.

use super::args::int;
use super::attention::{Sizes, part_number};
use super::driver::{MapElement, MapShape, TensorMap};
use super::module::{Define, Unit};
use super::{Cuda, Kernel, Launch, driver};
use crate::DType::{Bf16, F32, U32};
use crate::ops::attention::{AttentionBackward, Mask, Pages, Part};
use crate::{Error, Result, Tensor};

const VARIANTS: &[&[Define]] = &[&[("HEAD_DIM", 64), ("PAGE_TOKENS", 128)], &[("HEAD_DIM", 128), ("PAGE_TOKENS", 128)]];

pub(super) static FORWARD: Unit = Unit {
    stem: "attention_forward_sm90",
    source: include_str!("../../kernels/attention_forward_sm90.cu"),
    variants: VARIANTS,
    only: Some(ARCH),
};

pub(super) static BACKWARD: Unit = Unit {
    stem: "attention_backward_sm90",
    source: include_str!("../../kernels/attention_backward_sm90.cu"),
    variants: VARIANTS,
    only: Some(ARCH),
};

/// Keys of a tile; a page is whole tiles.
const KV_TILE: usize = 128;
const FORWARD_Q_TILE: usize = 128;
const BACKWARD_Q_TILE: usize = 64;
/// A warpgroup that copies and two that compute.
const THREADS: u32 = 384;
/// Room for barriers and the description of the work behind the tiles.
const SHARED_TAIL: usize = 256;
const ARCH: &str = "sm_90a";

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    q: TensorMap,
    kv: TensorMap,
    o: u64,
    lse: u64,
    carry: u64,
    refs: u64,
    first: u64,
    num_refs: i32,
    num_queries: i32,
    num_heads: i32,
    num_kv_heads: i32,
    start: i32,
    scale_log2: f32,
    part: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    q: TensorMap,
    d_o: TensorMap,
    kv: TensorMap,
    dq: TensorMap,
    dkv: u64,
    lse: u64,
    delta: u64,
    refs: u64,
    grad_refs: u64,
    first: u64,
    turns: u64,
    seed: u64,
    num_refs: i32,
    num_queries: i32,
    num_heads: i32,
    num_kv_heads: i32,
    start: i32,
    grad_is_bf16: i32,
    scale: f32,
    scale_log2: f32,
}

/// `[T, H, Dh]`, of which `tokens` of one head and 128 bytes are copied at once.
fn map_of_heads(address: u64, sizes: &Sizes, element: MapElement, tokens: usize) -> Result<TensorMap> {
    let (bytes, columns) = match element {
        MapElement::Bf16 => (2, 64),
        MapElement::F32 => (4, 32),
    };
    let row = (sizes.dim * bytes) as u64;
    let shape = MapShape {
        element,
        dims: &[sizes.dim as u64, sizes.heads as u64, sizes.queries as u64],
        strides: &[row, row * sizes.heads as u64],
        part: &[columns, 1, tokens as u32],
    };
    tensor_map(address, &shape)
}

/// The slab as rows of Dh, of which a tile's 64 columns are copied at once.
fn map_of_pages(address: u64, slab: &Tensor<Cuda>, sizes: &Sizes) -> Result<TensorMap> {
    let rows = slab.shape()[..4].iter().product::<usize>();
    let shape = MapShape {
        element: MapElement::Bf16,
        dims: &[sizes.dim as u64, rows as u64],
        strides: &[(sizes.dim * 2) as u64],
        part: &[64, KV_TILE as u32],
    };
    tensor_map(address, &shape)
}

fn tensor_map(address: u64, shape: &MapShape<'_>) -> Result<TensorMap> {
    driver::tensor_map(address, shape).map_err(|error| Error::Failed { op: "tensor map".into(), detail: error.to_string() })
}

impl Cuda {
    /// Whether this module's kernels take a call.
    pub(super) fn takes_sm90(&self, sizes: &Sizes) -> bool {
        !self.portable_attention && self.shared.modules.arch() == ARCH && sizes.page.is_multiple_of(KV_TILE)
    }

    #[expect(clippy::too_many_arguments, reason = "those of the op, checked there")]
    pub(super) fn attention_forward_sm90(
        &self,
        o: &Tensor<Self>,
        lse: &Tensor<Self>,
        carry: &Tensor<Self>,
        q: &Tensor<Self>,
        kv: Pages<'_, Self>,
        mask: Mask<'_, Self>,
        part: Part,
    ) {
        let op = self.op("attention_forward");
        let sizes = Sizes::of(op.name, q, &kv);
        let maps = || -> Result<_> {
            let q = map_of_heads(op.at("q", q, Bf16, &sizes.shape()), &sizes, MapElement::Bf16, FORWARD_Q_TILE)?;
            Ok((q, map_of_pages(self.pointer(kv.slab), kv.slab, &sizes)?))
        };
        let Some((q, kv_map)) = self.made(op.name, maps) else { return };
        let params = ForwardParams {
            q,
            kv: kv_map,
            o: op.at("o", o, Bf16, &sizes.shape()),
            lse: op.at("lse", lse, F32, &sizes.shape()[..2]),
            carry: op.at("carry", carry, F32, &sizes.shape()),
            refs: self.stage_pages(kv.refs),
            first: op.at("first", mask.first, U32, &[sizes.queries]),
            num_refs: int(kv.refs.len()),
            num_queries: int(sizes.queries),
            num_heads: int(sizes.heads),
            num_kv_heads: int(sizes.kv_heads),
            start: int(mask.start as usize),
            scale_log2: mask.scale * std::f32::consts::LOG2_E,
            part: part_number(part),
        };
        // q, two stages of k and v.
        let shared_bytes = (FORWARD_Q_TILE + 4 * KV_TILE) * sizes.dim * 2 + SHARED_TAIL;
        let works = sizes.queries.div_ceil(FORWARD_Q_TILE) * sizes.heads;
        let blocks = works.min(self.shared.multiprocessors as usize);
        let size = Launch { shared_bytes: shared_bytes as u32, ..Launch::linear(blocks as u64, THREADS) };
        let kernel = Kernel { unit: &FORWARD, defines: &sizes.defines(), name: "attention_forward_sm90" };
        self.launch(op.name, &kernel, size, &params);
    }

    pub(super) fn attention_backward_sm90(&self, dq: &Tensor<Self>, dkv: Pages<'_, Self>, args: AttentionBackward<'_, Self>) {
        let op = self.op("attention_backward");
        let sizes = Sizes::of(op.name, args.q, &args.kv);
        let maps = || -> Result<_> {
            let heads =
                |name, tensor| map_of_heads(op.at(name, tensor, Bf16, &sizes.shape()), &sizes, MapElement::Bf16, BACKWARD_Q_TILE);
            let kv = map_of_pages(self.pointer(args.kv.slab), args.kv.slab, &sizes)?;
            let dq = map_of_heads(op.at("dq", dq, F32, &sizes.shape()), &sizes, MapElement::F32, BACKWARD_Q_TILE)?;
            Ok((heads("q", args.q)?, heads("d_o", args.d_o)?, kv, dq))
        };
        let Some((q, d_o, kv, dq)) = self.made(op.name, maps) else { return };
        let params = BackwardParams {
            q,
            d_o,
            kv,
            dq,
            dkv: self.pointer(dkv.slab),
            lse: op.at("lse", args.lse, F32, &sizes.shape()[..2]),
            delta: op.at("delta", args.delta, F32, &sizes.shape()[..2]),
            refs: self.stage_pages(args.kv.refs),
            grad_refs: self.stage_pages(dkv.refs),
            first: op.at("first", args.mask.first, U32, &[sizes.queries]),
            turns: self.clear_turns(op.name, sizes.queries.div_ceil(BACKWARD_Q_TILE) * sizes.heads),
            seed: args.seed,
            num_refs: int(args.kv.refs.len()),
            num_queries: int(sizes.queries),
            num_heads: int(sizes.heads),
            num_kv_heads: int(sizes.kv_heads),
            start: int(args.mask.start as usize),
            grad_is_bf16: i32::from(dkv.slab.dtype() == Bf16),
            scale: args.mask.scale,
            scale_log2: args.mask.scale * std::f32::consts::LOG2_E,
        };
        // k, v; two stages each of q and do, of ds, of dq, of lse and delta.
        let (q_tile, dq) = (BACKWARD_Q_TILE * sizes.dim * 2, BACKWARD_Q_TILE * sizes.dim * 4);
        let (ds, rows) = (KV_TILE * BACKWARD_Q_TILE * 2, 2 * BACKWARD_Q_TILE * 4);
        let shared_bytes = 2 * KV_TILE * sizes.dim * 2 + 2 * (2 * q_tile + ds + dq + rows) + SHARED_TAIL;
        let blocks = args.kv.refs.len() * (sizes.page / KV_TILE) * sizes.kv_heads;
        let size = Launch { shared_bytes: shared_bytes as u32, ..Launch::linear(blocks as u64, THREADS) };
        let kernel = Kernel { unit: &BACKWARD, defines: &sizes.defines(), name: "attention_backward_sm90" };
        self.launch(op.name, &kernel, size, &params);
    }

    /// The result of something that can fail, or nothing where it or something before it failed.
    fn made<T>(&self, op: &str, make: impl FnOnce() -> Result<T>) -> Option<T> {
        let mut made = None;
        self.attempt(op, || {
            made = Some(make()?);
            Ok(())
        });
        made
    }
}
