//! Linear layers with weights as Hugging Face stores them, `[N, K]` (out, in).

use crate::{Device, Tensor};
use std::ops::Range;

/// What is added to a product before it is stored.
pub enum Epilogue<'a, B: Device> {
    /// Nothing.
    None,
    /// A vector `[N]`, activation dtype.
    Bias(&'a Tensor<B>),
    /// A matrix `[T, N]`, activation dtype; may be the output itself.
    Residual(&'a Tensor<B>),
}

/// Whether a result replaces or is added to what the output holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// The output's old content is not read.
    Overwrite,
    /// The result is added to the output.
    Accumulate,
}

/// Columns of a wider matrix, and the factor of what is added to them: a low-rank adapter of some rows of a fused projection.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    /// Which.
    pub range: Range<usize>,
    /// On the product.
    pub scale: f32,
}

/// Products of activations and weights; sums in f32.
pub trait LinearOps: Device {
    /// `y = x · wᵀ + epilogue`: `y` `[T, N]` overwritten, `x` `[T, K]`, `w` `[N, K]`, all activations.
    fn linear_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, epilogue: Epilogue<'_, Self>);

    /// `dx = dy · w` or `dx += dy · w`: `dx` `[T, K]`, `dy` `[T, N]`, `w` `[N, K]`, all activations.
    fn linear_backward_input(&self, dx: &mut Tensor<Self>, dy: &Tensor<Self>, w: &Tensor<Self>, write: Write);

    /// `dw = dyᵀ · x` or `dw += dyᵀ · x`: `dw` `[N, K]` f32, `dy` `[T, N]` and `x` `[T, K]` activations.
    fn linear_backward_weight(&self, dw: &mut Tensor<Self>, dy: &Tensor<Self>, x: &Tensor<Self>, write: Write);

    /// `dbias += Σ_t dy[t]`: **accumulates** into `[N]` f32 from `[T, N]`, deterministically.
    fn linear_backward_bias(&self, dbias: &mut Tensor<Self>, dy: &Tensor<Self>);

    /// `y[:, range] += scale · x · wᵀ`: **accumulates** into these columns of `y` `[T, N]` and leaves the others; `x` `[T, K]`,
    /// `w` `[range.len(), K]`, all activations.
    fn linear_columns_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, columns: &Columns);

    /// `dx = scale · dy[:, range] · w`, overwritten, `[T, K]` activation; `dw += scale · dy[:, range]ᵀ · x`, **accumulates** into
    /// `[range.len(), K]` f32. `dy` `[T, N]`, `x` `[T, K]`, `w` `[range.len(), K]`, all activations.
    fn linear_columns_backward(
        &self,
        dx: &mut Tensor<Self>,
        dw: &mut Tensor<Self>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        w: &Tensor<Self>,
        columns: &Columns,
    );
}
