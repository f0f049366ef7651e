//! Attention of one chunk's queries over pages of keys and values, forward and backward.
//!
//! Kernels see slots and logical positions. Which pages exist, where else they are stored and who else reads them is
//! none of their business.

use crate::{Device, Result, Tensor};

/// A page as a kernel sees it: where it sits in the slab, and which positions it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PageRef {
    /// Row of the slab.
    pub slot: u32,
    /// Logical page number: the page holds the sequence's positions `index * P .. (index + 1) * P`.
    pub index: u32,
}

/// A list of pages in a slab. Pages need not be consecutive, neither by slot nor by index.
pub struct Pages<'a, B: Device> {
    /// `[slots, 2 (k|v), G, P, Dh]`; activation dtype for k, v; f32 or bf16 for their gradients.
    pub slab: &'a Tensor<B>,
    /// The pages, in ascending order of `index`.
    pub refs: &'a [PageRef],
}

impl<B: Device> Clone for Pages<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Device> Copy for Pages<'_, B> {}

/// Which key positions a query may see: query `t` of the chunk stands at position `start + t` and sees the positions
/// `first[t] ..= start + t`. One number per query is causality, sliding window and document boundary at once.
pub struct Mask<'a, B: Device> {
    /// `[T]` u32: first visible position of each query, at most its own position; never decreasing with `t`.
    pub first: &'a Tensor<B>,
    /// Position of the chunk's first query in the sequence.
    pub start: u32,
    /// Factor on q·k, usually `1 / sqrt(Dh)`.
    pub scale: f32,
}

impl<B: Device> Clone for Mask<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Device> Copy for Mask<'_, B> {}

/// Where a call stands in the sequence of calls over the page groups of one chunk and layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The only group: `o` is written, the carry is not touched.
    Only,
    /// The first of several: the carry is overwritten.
    First,
    /// Merged into the carry.
    Middle,
    /// Merged with the carry; `o` is written.
    Last,
}

/// Attention with the softmax carried from group to group as (normalised output, log-sum-exp), both f32.
///
/// Formulas: FlashAttention-2 (arXiv 2307.08691), sections 3.1 and 3.2; `s = scale · q kᵀ` over visible keys,
/// `lse = log Σ exp s`, `p = exp(s - lse)`, `o = p v`. Query head `h` reads KV head `h / (H / G)`.
pub trait AttentionOps: Device {
    /// Whether there are kernels for this head dim and page length: asked before any work.
    ///
    /// # Errors
    /// Says what is wanted instead.
    fn check_attention(&self, _head_dim: usize, _page_tokens: usize) -> Result<()> {
        Ok(())
    }

    /// Attends to one group of pages.
    ///
    /// * `o` `[T, H, Dh]` activation: overwritten by [`Part::Only`] and [`Part::Last`], else untouched.
    /// * `lse` `[T, H]` f32: the log-sum-exp over all groups so far; minus infinity where nothing was visible yet. By the
    ///   last group every query has seen itself.
    /// * `carry` `[T, H, Dh]` f32: the normalised output so far (0 where nothing was visible), unless [`Part::Only`].
    /// * `q` `[T, H, Dh]` activation, rotated.
    ///
    /// Merging subtracts the larger log-sum-exp first. A position beyond the last query may lie in the last page; its
    /// content is undefined (even NaN) and must not be used.
    #[expect(clippy::too_many_arguments, reason = "outputs and inputs of one fused op, each documented")]
    fn attention_forward(
        &self,
        o: &mut Tensor<Self>,
        lse: &mut Tensor<Self>,
        carry: &mut Tensor<Self>,
        q: &Tensor<Self>,
        kv: Pages<'_, Self>,
        mask: Mask<'_, Self>,
        part: Part,
    );

    /// `delta[t, h] = Σ_d o · do`, f32, overwritten: `[T, H]` from `[T, H, Dh]` activations.
    fn attention_delta(&self, delta: &mut Tensor<Self>, o: &Tensor<Self>, d_o: &Tensor<Self>);

    /// Gradient through one group of pages; `ds = p ∘ (do vᵀ - delta)`.
    ///
    /// * `dq` `[T, H, Dh]` f32: **accumulates** `scale · ds k`.
    /// * `dkv`: **accumulates** `dk = scale · dsᵀ q` and `dv = pᵀ do` into the pages `dkv.refs`, which name the same
    ///   indices as `kv.refs` in the same order. Sums over the chunk's queries and the H / G heads are f32; each page is
    ///   added to once per call, stochastically rounded with `seed` where the slab is bf16. Rows of a page beyond the
    ///   last query are left as they are.
    /// * `lse`, `delta` `[T, H]` over all groups of the chunk; `d_o` `[T, H, Dh]` activation.
    ///
    /// Deterministic: the same inputs give the same bits.
    ///
    /// Stochastic rounding of x takes the bf16 next to x on either side, with the probability that makes the mean x. The
    /// CPU's random bits of an element are `splitmix64(seed + (i + 1) · 0x9E3779B97F4A7C15)`, as for
    /// [`fill_normal`](super::optim::OptimOps::fill_normal), with i the element's place in the sequence,
    /// `index · 2·G·P·Dh +` its place in the page; the sum's f32 bits plus the 16 highest of them are cut to bf16.
    /// Another backend may draw its bits otherwise, but not by slot: where a page sits must not matter.
    fn attention_backward(&self, dq: &mut Tensor<Self>, dkv: Pages<'_, Self>, args: AttentionBackward<'_, Self>);
}

/// What [`AttentionOps::attention_backward`] reads.
pub struct AttentionBackward<'a, B: Device> {
    /// `[T, H, Dh]` activation, rotated.
    pub q: &'a Tensor<B>,
    /// The group's keys and values.
    pub kv: Pages<'a, B>,
    /// Gradient of the output, `[T, H, Dh]` activation.
    pub d_o: &'a Tensor<B>,
    /// `[T, H]` f32, over all groups.
    pub lse: &'a Tensor<B>,
    /// `[T, H]` f32, from [`AttentionOps::attention_delta`].
    pub delta: &'a Tensor<B>,
    /// The mask of the forward call.
    pub mask: Mask<'a, B>,
    /// Seed of the stochastic rounding into bf16 pages; differs by step, chunk and layer.
    pub seed: u64,
}
