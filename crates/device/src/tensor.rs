//! A tensor: a run of a device buffer with a shape and a dtype. Contiguous only; views narrow the first dimension.
//!
//! It must not know what any op does with it.

use crate::Device;
use std::fmt;
use std::ops::Range;

/// Element types of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16. On the CPU: held in f32, rounded to bf16 by every op that stores it.
    Bf16,
    /// 32-bit float.
    F32,
    /// 64-bit float: scalars and tables that need it, never activations.
    F64,
    /// Token ids, positions, counts.
    U32,
    /// Bytes: codes of 8-bit moments ([`crate::ops::moments`]).
    U8,
}

impl DType {
    /// Whether the elements are floating point.
    pub fn is_float(self) -> bool {
        !matches!(self, Self::U32 | Self::U8)
    }
}

/// At most this many dimensions.
pub const MAX_DIMS: usize = 5;

/// Buffer, byte offset, shape, dtype. Cloning shares the memory.
///
/// Ops take their outputs as `&mut Tensor` so that a call reads well; two tensors may still view the same bytes, and what
/// orders their uses is the stream (see [`Device`]).
pub struct Tensor<B: Device> {
    buffer: B::Buffer,
    offset_bytes: u64,
    element_bytes: usize,
    dtype: DType,
    dims: [usize; MAX_DIMS],
    num_dims: usize,
}

impl<B: Device> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), ..*self }
    }
}

impl<B: Device> fmt::Debug for Tensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{:?}", self.dtype, self.shape())
    }
}

impl<B: Device> Tensor<B> {
    /// Views `buffer` from `offset_bytes` on.
    ///
    /// # Panics
    /// If there are more than [`MAX_DIMS`] dimensions.
    pub fn new(buffer: B::Buffer, offset_bytes: u64, dtype: DType, element_bytes: usize, shape: &[usize]) -> Self {
        assert!(shape.len() <= MAX_DIMS, "a tensor has at most {MAX_DIMS} dimensions, got {shape:?}");
        let mut dims = [1; MAX_DIMS];
        dims[..shape.len()].copy_from_slice(shape);
        Self { buffer, offset_bytes, element_bytes, dtype, dims, num_dims: shape.len() }
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.dims[..self.num_dims]
    }

    /// Dimension `index`, counted from the outermost.
    pub fn dim(&self, index: usize) -> usize {
        self.shape()[index]
    }

    /// Size of the first dimension.
    pub fn rows(&self) -> usize {
        self.dim(0)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory this views.
    pub fn buffer(&self) -> &B::Buffer {
        &self.buffer
    }

    /// Where the view starts in [`Self::buffer`].
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// Size of one element in memory.
    pub fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    /// Size of the view in memory.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.element_bytes as u64
    }

    /// The view of `range` of the first dimension.
    ///
    /// # Panics
    /// If the range leaves the tensor.
    pub fn narrow(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows(), "rows {range:?} of {self:?}");
        let row_bytes = self.bytes() / (self.rows().max(1) as u64);
        let mut view = self.clone();
        view.offset_bytes += range.start as u64 * row_bytes;
        view.dims[0] = range.len();
        view
    }

    /// Row `index` of the first dimension, with that dimension dropped.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn index(&self, index: usize) -> Self {
        let row = self.narrow(index..index + 1);
        row.reshape(&self.shape()[1..])
    }

    /// The same elements under another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.len(), "reshape {self:?} to {shape:?}");
        Self::new(self.buffer.clone(), self.offset_bytes, self.dtype, self.element_bytes, shape)
    }
}
