//! From the fused projection to rotated queries in rows and keys, values in pages, and back.

use super::attention::Pages;
use crate::{Device, Tensor};

/// Per-head RMS norm of q and k before the rotation (Qwen3), weights `[Dh]`.
pub struct QkNorm<'a, B: Device> {
    /// Weight of q's norm.
    pub q_weight: &'a Tensor<B>,
    /// Weight of k's norm.
    pub k_weight: &'a Tensor<B>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Gradients of [`QkNorm`]'s weights, `[Dh]` f32, accumulated.
pub struct QkNormGrad<'a, B: Device> {
    /// Of q's weight.
    pub dq_weight: &'a mut Tensor<B>,
    /// Of k's weight.
    pub dk_weight: &'a mut Tensor<B>,
}

/// Rotary position embedding in the half-split layout of transformers (`rotate_half`): for `d < Dh/2`,
/// `out[d] = x[d]·cos - x[d + Dh/2]·sin`, `out[d + Dh/2] = x[d + Dh/2]·cos + x[d]·sin`.
pub trait RopeOps: Device {
    /// `table[t, d] = scale · (cos, sin)(positions[t] · inv_freq[d])`: `table` `[T, Dh/2, 2]` f32 overwritten, `positions`
    /// `[T]` u32, `inv_freq` `[Dh/2]` f64. The product and its reduction are f64, so that position 4,194,304 is as exact
    /// as position 4.
    fn rope_table(&self, table: &mut Tensor<Self>, positions: &Tensor<Self>, inv_freq: &Tensor<Self>, scale: f32);

    /// Splits `qkv` `[T, (H + 2G)·Dh]` (heads of q, then k, then v), norms q and k per head where asked, rotates them,
    /// and stores q into `q` `[T, H, Dh]` (overwritten) and k, v into `pages`: with `r = first_row + t`, row t into row
    /// `r % P` of `pages.refs[r / P]`; `first_row < P`. Without `pages` (they hold these k, v already) only q is stored.
    /// The pages' other rows, before the first and after the last, are left as they are.
    fn qkv_forward(
        &self,
        q: &mut Tensor<Self>,
        pages: Option<Pages<'_, Self>>,
        first_row: usize,
        qkv: &Tensor<Self>,
        norm: Option<QkNorm<'_, Self>>,
        table: &Tensor<Self>,
    );

    /// `qkv` `[T, (H + 2G)·Dh]` is **overwritten** by its own gradient, from `dq` `[T, H, Dh]` f32 and the pages'
    /// dk, dv (row t as in [`Self::qkv_forward`] from row 0 on; f32 or bf16), both with respect to the rotated values. Gradients of
    /// the norms **accumulate**, deterministically; frozen norms have none.
    fn qkv_backward(
        &self,
        qkv: &mut Tensor<Self>,
        dq: &Tensor<Self>,
        grads: Pages<'_, Self>,
        norm: Option<(QkNorm<'_, Self>, Option<QkNormGrad<'_, Self>>)>,
        table: &Tensor<Self>,
    );
}
