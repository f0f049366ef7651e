//! Filling, the global norm, and AdamW.

use crate::{Device, Tensor};

/// AdamW's numbers for one update of one tensor. `step` counts from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled: `w -= lr · weight_decay · w`.
    pub weight_decay: f32,
    /// Optimizer step, from 1: `m / (1 - beta1^step)`, `v / (1 - beta2^step)`.
    pub step: u32,
}

/// Clipping by the global norm, without the host knowing it: gradients are scaled by `min(1, max_norm / (norm + 1e-6))`
/// (torch.nn.utils.clip_grad_norm_).
pub struct Clip<'a, B: Device> {
    /// `[1]` f64: the sum of squares of all gradients.
    pub norm_squared: &'a Tensor<B>,
    /// The largest norm allowed.
    pub max_norm: f32,
}

/// One moment of a parameter.
pub struct Moment<'a, B: Device> {
    /// `[…]` of the parameter's length: f32; or bf16, rounded stochastically; or U8, codes as [`super::moments`] defines them.
    pub values: &'a mut Tensor<B>,
    /// `[len / 256, rounded up]` f32, of codes only: the scale of each [`super::moments::BLOCK_ELEMENTS`] elements.
    pub scales: Option<&'a mut Tensor<B>>,
}

/// A parameter's optimizer state.
pub struct AdamWState<'a, B: Device> {
    /// `[…]` f32 of the parameter's length: the weights where the parameter itself is bf16; then the parameter is the rounded
    /// master. Without one a bf16 parameter is rounded stochastically.
    pub master: Option<&'a mut Tensor<B>>,
    /// First moment.
    pub m: Moment<'a, B>,
    /// Second moment, stored as the first is.
    pub v: Moment<'a, B>,
    /// Of what is rounded stochastically.
    pub random: RandomBits,
}

/// Which random bits an update rounds with: element `i` of the tensor has those of
/// `z = splitmix64(seed + (first + i + 1) · 0x9E3779B97F4A7C15)`, as [`OptimOps::fill_normal`]: from the highest on 16 for the
/// weight, 20 for the first moment, 20 for the second (of which bf16 takes the upper 16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RandomBits {
    /// Differs by step.
    pub seed: u64,
    /// Number of the tensor's first element among all that are updated in the step.
    pub first: u64,
}

/// Whole-tensor ops.
pub trait OptimOps: Device {
    /// Sets every element of a float tensor to `value`, or of a U8 tensor to the whole number that `value` is.
    fn fill(&self, x: &mut Tensor<Self>, value: f32);

    /// `dst = src` on the compute stream, converting between float dtypes; same number of elements.
    fn copy(&self, dst: &mut Tensor<Self>, src: &Tensor<Self>);

    /// Fills a float tensor with normal numbers of mean 0: element `i` is a function of `(seed, i)` alone, so that every
    /// backend makes the same weights (up to rounding).
    ///
    /// Definition: `z = splitmix64(seed + (i + 1) · 0x9E3779B97F4A7C15)` (the finaliser of SplitMix64 applied to that
    /// sum, wrapping), `u1 = ((z >> 40) + 1) / 2^24`, `u2 = ((z >> 8) & 0xFFFFFF) / 2^24`,
    /// `x = std · sqrt(-2 ln u1) · cos(2π u2)`.
    fn fill_normal(&self, x: &mut Tensor<Self>, std: f32, seed: u64);

    /// `out += Σ x²`: **accumulates** into `[1]` f64, deterministically; `x` f32 or bf16.
    fn sum_squares(&self, out: &mut Tensor<Self>, x: &Tensor<Self>);

    /// One AdamW update (decoupled decay, Loshchilov & Hutter) of `w` (activation dtype) by `grad` (f32), which is left
    /// as it is. Order as in torch: decay, moments, `w -= lr · m̂ / (sqrt(v̂) + eps)`.
    /// The weight is changed by the moments as computed, before they are rounded.
    fn adamw(
        &self,
        w: &mut Tensor<Self>,
        state: AdamWState<'_, Self>,
        grad: &Tensor<Self>,
        hyper: AdamW,
        clip: Option<Clip<'_, Self>>,
    );
}
