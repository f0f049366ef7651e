//! The gated MLP's elementwise middle.

use crate::{Device, Tensor};

/// SwiGLU: `y = silu(gate) · up`, gate and up side by side in one row.
pub trait MlpOps: Device {
    /// `y` `[T, F]` overwritten from `gate_up` `[T, 2F]` (columns `0..F` gate, `F..2F` up); activations.
    fn swiglu_forward(&self, y: &mut Tensor<Self>, gate_up: &Tensor<Self>);

    /// `gate_up` `[T, 2F]` is **overwritten** by its own gradient, given `dy` `[T, F]`, which is **overwritten** by the forward's `y`:
    /// the gradient of the next product's weight needs it; activations.
    fn swiglu_backward(&self, gate_up: &mut Tensor<Self>, dy: &mut Tensor<Self>);
}
