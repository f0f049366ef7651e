//! Checks of shapes and dtypes before a launch: a mismatch is our own mistake and panics naming the op.

use super::Cuda;
use crate::{DType, Tensor};

/// An op by name.
#[derive(Clone, Copy)]
pub(super) struct Op<'a> {
    pub(super) cuda: &'a Cuda,
    pub(super) name: &'static str,
}

impl Op<'_> {
    /// The address of a tensor of exactly this dtype and shape.
    pub(super) fn at(&self, argument: &str, tensor: &Tensor<Cuda>, dtype: DType, shape: &[usize]) -> u64 {
        let fits = tensor.dtype() == dtype && tensor.shape() == shape;
        assert!(fits, "{}: {argument} is {tensor:?}, wanted {dtype:?}{shape:?}", self.name);
        self.cuda.pointer(tensor)
    }
}

impl Cuda {
    pub(super) fn op(&self, name: &'static str) -> Op<'_> {
        Op { cuda: self, name }
    }
}

/// A dimension as kernels take it.
pub(super) fn int(value: usize) -> i32 {
    i32::try_from(value).expect("dimensions fit 31 bits; only offsets need more")
}
