//! Root-mean-square norm over the last dimension.

use crate::{Device, Tensor};

/// `y = x · rstd · weight` with `rstd = 1 / sqrt(mean(x²) + eps)` per row.
pub trait NormOps: Device {
    /// `y` `[T, D]` activation and `rstd` `[T]` f32 overwritten; `x` `[T, D]`, `weight` `[D]` activations.
    fn rmsnorm_forward(&self, y: &mut Tensor<Self>, rstd: &mut Tensor<Self>, x: &Tensor<Self>, weight: &Tensor<Self>, eps: f32);

    /// `dx` `[T, D]` activation **accumulates** (it holds the residual's gradient); `dweight` `[D]` f32 **accumulates**,
    /// deterministically; a frozen weight has none. With `g = dy · weight`: `dx += rstd · (g - x · rstd² · mean(g · x))`, `dweight += Σ_t dy · x · rstd`.
    fn rmsnorm_backward(
        &self,
        dx: &mut Tensor<Self>,
        dweight: Option<&mut Tensor<Self>>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        rstd: &Tensor<Self>,
        weight: &Tensor<Self>,
    );
}
