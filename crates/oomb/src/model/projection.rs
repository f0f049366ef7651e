//! A projection with its adapters, forward and backward. It must not know which projection of a layer it is.
//!
//! Adapters are computed beside the frozen matrix: `y[:, rows] += scale · (x aᵀ) bᵀ`. `x aᵀ` is computed again in the backward,
//! so that one buffer serves all layers.

use oomb_device::ops::linear::{Columns, Epilogue, Write};
use oomb_device::{Backend, Tensor};

/// The adapter of some rows of a projection, or its gradient.
pub struct Adapter<B: Backend> {
    /// `[r, K]`.
    pub a: Tensor<B>,
    /// `[rows, r]`.
    pub b: Tensor<B>,
    /// Those rows, as columns of the product, and the adapter's factor.
    pub columns: Columns,
}

/// A matrix `[N, K]` and the adapters of its rows.
pub struct Projection<B: Backend> {
    /// `[N, K]`.
    pub weight: Tensor<B>,
    /// None where the matrix itself is trained.
    pub adapters: Vec<Adapter<B>>,
}

/// A matrix's gradient.
pub struct MatrixGrad<B: Backend> {
    /// `[N, K]` f32; undefined before a step's first product where that overwrites.
    pub tensor: Tensor<B>,
    /// What the next product does.
    pub write: Write,
}

impl<B: Backend> MatrixGrad<B> {
    /// Adds `dyᵀ · x`, or begins with it.
    pub fn add(&mut self, device: &B, dy: &Tensor<B>, x: &Tensor<B>) {
        device.linear_backward_weight(&mut self.tensor, dy, x, self.write);
        self.write = Write::Accumulate;
    }
}

/// What a backward adds to, f32.
pub struct ProjectionGrad<B: Backend> {
    /// Absent where the matrix is frozen.
    pub weight: Option<MatrixGrad<B>>,
    /// One for each adapter.
    pub adapters: Vec<Adapter<B>>,
}

/// Buffers `[t, r]` that all adapters share.
#[derive(Clone)]
pub struct AdapterBuffers<B: Backend> {
    /// `x aᵀ`.
    pub hidden: Tensor<B>,
    /// Its gradient; absent in an evaluation.
    pub d_hidden: Option<Tensor<B>>,
}

const PLANNED: &str = "where there are adapters their buffers are planned";

/// `y = x · weightᵀ + epilogue`, and what the adapters add: `y` `[t, N]`, `x` `[t, K]`.
pub fn forward<B: Backend>(
    device: &B,
    y: &mut Tensor<B>,
    x: &Tensor<B>,
    projection: &Projection<B>,
    epilogue: Epilogue<'_, B>,
    buffers: &mut Option<AdapterBuffers<B>>,
) {
    device.linear_forward(y, x, &projection.weight, epilogue);
    for adapter in &projection.adapters {
        let AdapterBuffers { hidden, .. } = buffers.as_mut().expect(PLANNED);
        device.linear_forward(hidden, x, &adapter.a, Epilogue::None);
        device.linear_columns_forward(y, hidden, &adapter.b, &adapter.columns);
    }
}

/// From `dy` `[t, N]` to `dx` `[t, K]`, overwritten; gradients are added to `grads`.
pub fn backward<B: Backend>(
    device: &B,
    (dx, dy): (&mut Tensor<B>, &Tensor<B>),
    x: &Tensor<B>,
    projection: &Projection<B>,
    grads: &mut ProjectionGrad<B>,
    buffers: &mut Option<AdapterBuffers<B>>,
) {
    if let Some(weight) = &mut grads.weight {
        weight.add(device, dy, x);
    }
    device.linear_backward_input(dx, dy, &projection.weight, Write::Overwrite);
    for (adapter, grad) in projection.adapters.iter().zip(&mut grads.adapters) {
        let Some(AdapterBuffers { hidden, d_hidden: Some(d_hidden) }) = buffers else { panic!("{PLANNED}") };
        device.linear_forward(hidden, x, &adapter.a, Epilogue::None);
        device.linear_columns_backward(d_hidden, &mut grad.b, dy, hidden, &adapter.b, &adapter.columns);
        device.linear_backward_weight(&mut grad.a, d_hidden, x, Write::Accumulate);
        device.linear_backward_input(dx, d_hidden, &adapter.a, Write::Accumulate);
    }
}
