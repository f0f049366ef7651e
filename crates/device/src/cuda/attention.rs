//! [`AttentionOps`] on the GPU: the portable `mma.sync` kernels, for compute capability 8.0 and up, head dims 64 and 128; calls that
//! the kernels of [`attention_sm90`](super::attention_sm90) take go there.

use super::args::int;
use super::module::{Define, Unit};
use super::{Cuda, Kernel, Launch, driver};
use crate::DType::{Bf16, F32, U32};
use crate::ops::attention::{AttentionBackward, AttentionOps, Mask, Pages, Part};
use crate::{Device, Error, Result, Stream, Tensor};

const VARIANTS: &[&[Define]] = &[
    &[("HEAD_DIM", 64), ("PAGE_TOKENS", 128)],
    &[("HEAD_DIM", 128), ("PAGE_TOKENS", 128)],
    &[("HEAD_DIM", 128), ("PAGE_TOKENS", 64)],
];

pub(super) static FORWARD: Unit = Unit {
    stem: "attention_forward",
    source: include_str!("../../kernels/attention_forward.cu"),
    variants: VARIANTS,
    only: None,
};

pub(super) static BACKWARD: Unit = Unit {
    stem: "attention_backward",
    source: include_str!("../../kernels/attention_backward.cu"),
    variants: VARIANTS,
    only: None,
};

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    o: u64,
    lse: u64,
    carry: u64,
    q: u64,
    kv: u64,
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
    dq: u64,
    dkv: u64,
    q: u64,
    kv: u64,
    d_o: u64,
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

#[repr(C)]
#[derive(Clone, Copy)]
struct DeltaParams {
    delta: u64,
    o: u64,
    d_o: u64,
    num_rows: i64,
}

/// What a call works on.
pub(super) struct Sizes {
    pub(super) queries: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) page: usize,
}

impl Sizes {
    pub(super) fn of(op: &'static str, q: &Tensor<Cuda>, kv: &Pages<'_, Cuda>) -> Self {
        let [queries, heads, dim] = *q.shape() else { panic!("{op}: q is {q:?}, wanted [T, H, Dh]") };
        let [_, 2, kv_heads, page, slab_dim] = *kv.slab.shape() else { panic!("{op}: slab {:?}", kv.slab) };
        assert!(slab_dim == dim && heads.is_multiple_of(kv_heads) && kv.slab.dtype() == Bf16, "{op}: {q:?} over {:?}", kv.slab);
        assert!([64, 128].contains(&dim) && page.is_multiple_of(64), "{op}: head dim {dim}, pages of {page}: not checked before");
        Self { queries, heads, kv_heads, dim, page }
    }

    pub(super) fn defines(&self) -> [Define; 2] {
        [("HEAD_DIM", self.dim as u32), ("PAGE_TOKENS", self.page as u32)]
    }

    pub(super) fn shape(&self) -> [usize; 3] {
        [self.queries, self.heads, self.dim]
    }
}

/// Tiles of the backward, as large as shared memory allows.
struct Tiles {
    queries: usize,
    keys: usize,
    shared_bytes: u32,
}

impl Tiles {
    fn choose(sizes: &Sizes, available_bytes: u32) -> Self {
        let widest = if sizes.page.is_multiple_of(128) { 128 } else { 64 };
        let queries = if sizes.dim == 64 { 128 } else { 64 };
        let candidates = [(queries, widest), (queries, 64), (queries / 2, 64)];
        let tiles =
            candidates.map(|(queries, keys)| Self { queries, keys, shared_bytes: shared_bytes(queries, keys, sizes.dim) });
        let [.., smallest] = &tiles;
        let smallest = Self { ..*smallest };
        tiles.into_iter().find(|tiles| tiles.shared_bytes <= available_bytes).unwrap_or(smallest)
    }
}

/// Shared memory of the backward, as its `Places` lays it out: k and v, two stages of q and do, p and ds, two stages of lse and
/// delta, dq staged, two arrivals.
fn shared_bytes(queries: usize, keys: usize, dim: usize) -> u32 {
    let (q_tile, kv_tile, p_tile) = (queries * dim * 2, keys * dim * 2, queries * keys * 2);
    (2 * kv_tile + 4 * q_tile + 2 * p_tile + 4 * queries * 4 + 4 * queries * (dim + 32) + 16) as u32
}

/// A [`Part`] as kernels know it.
pub(super) fn part_number(part: Part) -> i32 {
    match part {
        Part::Only => 0,
        Part::First => 1,
        Part::Middle => 2,
        Part::Last => 3,
    }
}

impl Cuda {
    /// A ticket counter and the turns of `num_tiles` dq tiles, zeroed, in scratch memory.
    pub(super) fn clear_turns(&self, op: &'static str, num_tiles: usize) -> u64 {
        let bytes = (1 + num_tiles as u64) * 4;
        let (turns, scratch_bytes) = self.scratch();
        assert!(bytes <= scratch_bytes, "{op}: {num_tiles} tiles of queries are too many");
        self.attempt(op, || {
            driver::zero(turns, bytes, self.stream(Stream::Compute))
                .map_err(|error| Error::Failed { op: op.to_owned(), detail: error.to_string() })
        });
        turns
    }
}

impl AttentionOps for Cuda {
    fn check_attention(&self, head_dim: usize, page_tokens: usize) -> Result<()> {
        if [64, 128].contains(&head_dim) && page_tokens.is_multiple_of(64) {
            return Ok(());
        }
        let wanted = "wanted a head_dim of 64 or 128 and kv.page_tokens a multiple of 64";
        let detail = format!("{wanted}, got head_dim {head_dim} and page_tokens {page_tokens}: set run.device = \"cpu\"");
        Err(Error::Unavailable { name: self.name(), detail })
    }

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
        const Q_TILE: usize = 128;
        const KV_TILE: usize = 64;
        let op = self.op("attention_forward");
        let sizes = Sizes::of(op.name, q, &kv);
        if self.takes_sm90(&sizes) {
            return self.attention_forward_sm90(o, lse, carry, q, kv, mask, part);
        }
        let params = ForwardParams {
            o: op.at("o", o, Bf16, &sizes.shape()),
            lse: op.at("lse", lse, F32, &sizes.shape()[..2]),
            carry: op.at("carry", carry, F32, &sizes.shape()),
            q: op.at("q", q, Bf16, &sizes.shape()),
            kv: self.pointer(kv.slab),
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
        let shared_bytes = (Q_TILE + 3 * KV_TILE) * sizes.dim * 2;
        let blocks = sizes.queries.div_ceil(Q_TILE) * sizes.heads;
        let size = Launch { shared_bytes: shared_bytes as u32, ..Launch::linear(blocks as u64, 128) };
        let kernel = Kernel { unit: &FORWARD, defines: &sizes.defines(), name: "attention_forward" };
        self.launch(op.name, &kernel, size, &params);
    }

    fn attention_delta(&self, delta: &mut Tensor<Self>, o: &Tensor<Self>, d_o: &Tensor<Self>) {
        let op = self.op("attention_delta");
        let [t, h, dim] = *o.shape() else { panic!("{}: o is {o:?}, wanted [T, H, Dh]", op.name) };
        let params = DeltaParams {
            delta: op.at("delta", delta, F32, &[t, h]),
            o: op.at("o", o, Bf16, o.shape()),
            d_o: op.at("d_o", d_o, Bf16, o.shape()),
            num_rows: (t * h) as i64,
        };
        let defines = [("HEAD_DIM", dim as u32), ("PAGE_TOKENS", 128)];
        let kernel = Kernel { unit: &BACKWARD, defines: &defines, name: "attention_delta" };
        self.launch(op.name, &kernel, Launch::linear((t * h).div_ceil(8) as u64, 256), &params);
    }

    fn attention_backward(&self, dq: &mut Tensor<Self>, dkv: Pages<'_, Self>, args: AttentionBackward<'_, Self>) {
        let op = self.op("attention_backward");
        let sizes = Sizes::of(op.name, args.q, &args.kv);
        let same = dkv.refs.iter().map(|page| page.index).eq(args.kv.refs.iter().map(|page| page.index));
        assert!(same && dkv.slab.shape()[1..] == args.kv.slab.shape()[1..], "{}: pages of k, v and of dk, dv differ", op.name);
        if self.takes_sm90(&sizes) {
            return self.attention_backward_sm90(dq, dkv, args);
        }
        let tiles = Tiles::choose(&sizes, self.shared.shared_bytes);
        let params = BackwardParams {
            dq: op.at("dq", dq, F32, &sizes.shape()),
            dkv: self.pointer(dkv.slab),
            q: op.at("q", args.q, Bf16, &sizes.shape()),
            kv: self.pointer(args.kv.slab),
            d_o: op.at("d_o", args.d_o, Bf16, &sizes.shape()),
            lse: op.at("lse", args.lse, F32, &sizes.shape()[..2]),
            delta: op.at("delta", args.delta, F32, &sizes.shape()[..2]),
            refs: self.stage_pages(args.kv.refs),
            grad_refs: self.stage_pages(dkv.refs),
            first: op.at("first", args.mask.first, U32, &[sizes.queries]),
            turns: self.clear_turns(op.name, sizes.queries.div_ceil(tiles.queries) * sizes.heads),
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
        let blocks = args.kv.refs.len() * (sizes.page / tiles.keys) * sizes.kv_heads;
        let size = Launch { shared_bytes: tiles.shared_bytes, ..Launch::linear(blocks as u64, 256) };
        let [head_dim, page_tokens] = sizes.defines();
        let defines = [head_dim, page_tokens, ("Q_TILE", tiles.queries as u32), ("KV_TILE", tiles.keys as u32)];
        let kernel = Kernel { unit: &BACKWARD, defines: &defines, name: "attention_backward" };
        self.launch(op.name, &kernel, size, &params);
    }
}
