//! Memory of the CPU device, and the typed views of it that an op's closure captures.
//!
//! It must not know streams or ops.
//!
//! # Ordering
//! A view hands out slices of memory that other streams may touch. What keeps them from racing is the contract of
//! [`crate::Device`]: commands of one stream run one after another on one thread, and whoever shares bytes between
//! streams orders the uses by events. A caller who breaks it reads or leaves unspecified numbers (of types for which
//! every bit pattern is a value), never a wild pointer: views hold the memory and their bounds are checked when made.

use super::{Poison, real::Rounding};
use crate::{DType, Error, Result, Tensor};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A cache line, and one AVX-512 register.
const ALIGN: usize = align_of::<CacheLine>();

#[repr(align(64))]
struct CacheLine;

/// Bytes handed out in one tier.
#[derive(Default)]
pub(super) struct Ledger(AtomicU64);

impl Ledger {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Memory {
    start: NonNull<u8>,
    layout: Layout,
    ledger: Arc<Ledger>,
}

// SAFETY: `Memory` is a plain run of bytes owned by this value; who reads and writes it when is the ordering contract above.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        self.ledger.0.fetch_sub(self.layout.size() as u64, Ordering::Relaxed);
        if self.layout.size() > 0 {
            // SAFETY: allocated in `Memory::new` with this layout, and this is the last handle.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

/// What an allocation may take, and where it is counted.
pub(super) struct Request<'a> {
    pub(super) tier: &'static str,
    pub(super) bytes: u64,
    pub(super) limit: Option<u64>,
    pub(super) ledger: &'a Arc<Ledger>,
    pub(super) poison: Poison,
}

impl Memory {
    fn new(request: &Request<'_>) -> Result<Self> {
        let Request { tier, bytes, limit, ledger, poison } = *request;
        let fits = |allocated: u64| allocated.checked_add(bytes).filter(|&sum| limit.is_none_or(|limit| sum <= limit));
        let before = ledger.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map_err(|allocated| {
            let most = limit.unwrap_or(u64::MAX);
            Error::out_of_memory(tier, bytes, allocated, format!("the device is limited to {most} bytes"))
        })?;
        let refuse = |detail: String| {
            ledger.0.fetch_sub(bytes, Ordering::Relaxed);
            Error::out_of_memory(tier, bytes, before, detail)
        };
        let layout = usize::try_from(bytes).ok().and_then(|size| Layout::from_size_align(size, ALIGN).ok());
        let Some(layout) = layout else {
            return Err(refuse("more than the address space holds".to_owned()));
        };
        if bytes == 0 {
            return Ok(Self { start: NonNull::<CacheLine>::dangling().cast(), layout, ledger: ledger.clone() });
        }
        // SAFETY: the layout's size is not zero.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            return Err(refuse("the system allocator refused".to_owned()));
        };
        if poison == Poison::On {
            // SAFETY: `start` was just allocated with this size and nothing else knows it yet.
            unsafe { start.as_ptr().write_bytes(0xFF, layout.size()) };
        }
        Ok(Self { start, layout, ledger: ledger.clone() })
    }
}

/// A run of the CPU's device memory.
#[derive(Clone)]
pub struct Buffer(Arc<Memory>);

/// A run of the CPU's pinned host memory.
#[derive(Clone)]
pub struct HostBuffer(Arc<Memory>);

impl Buffer {
    pub(super) fn new(request: &Request<'_>) -> Result<Self> {
        Memory::new(request).map(|memory| Self(Arc::new(memory)))
    }

    /// The bytes `range`, to be read or written by a copy.
    pub(super) fn span(&self, offset: u64, bytes: u64) -> Span {
        Span::new(&self.0, offset, bytes)
    }
}

impl HostBuffer {
    pub(super) fn new(request: &Request<'_>) -> Result<Self> {
        Memory::new(request).map(|memory| Self(Arc::new(memory)))
    }

    /// The bytes `range`, to be read or written by a copy.
    pub(super) fn span(&self, offset: u64, bytes: u64) -> Span {
        Span::new(&self.0, offset, bytes)
    }
}

/// A run of bytes, inside its memory.
#[derive(Clone)]
pub(super) struct Span {
    memory: Arc<Memory>,
    offset: usize,
    bytes: usize,
}

impl Span {
    fn new(memory: &Arc<Memory>, offset: u64, bytes: u64) -> Self {
        let size = memory.layout.size() as u64;
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= size);
        assert!(inside, "bytes {offset} .. {offset} + {bytes} of a buffer of {size} bytes");
        Self { memory: memory.clone(), offset: offset as usize, bytes: bytes as usize }
    }

    /// Whether both name some byte.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory)
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }

    /// Overwrites these bytes with those of `src`, as many.
    pub(super) fn copy_from(&self, src: &Self) {
        assert_eq!(self.bytes, src.bytes, "a copy between spans of different lengths");
        assert!(!self.overlaps(src), "a copy onto itself");
        // SAFETY: both spans lie in their memory (checked when made) and do not overlap; concurrent uses are excluded by
        // the ordering contract.
        unsafe { src.start().copy_to_nonoverlapping(self.start(), self.bytes) };
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the offset lies inside the allocation or at its end.
        unsafe { self.memory.start.as_ptr().add(self.offset) }
    }
}

/// An element type that a view can have; every bit pattern is a value.
pub(super) trait Element: bytemuck::Pod + Send + Sync {
    /// Whether a tensor of this tag and element size holds this type.
    fn is_stored_as(dtype: DType, element_bytes: usize) -> bool;
}

impl Element for f32 {
    fn is_stored_as(dtype: DType, element_bytes: usize) -> bool {
        matches!(dtype, DType::F32 | DType::Bf16) && element_bytes == 4
    }
}

impl Element for f64 {
    fn is_stored_as(dtype: DType, element_bytes: usize) -> bool {
        dtype.is_float() && element_bytes == 8
    }
}

impl Element for u32 {
    fn is_stored_as(dtype: DType, element_bytes: usize) -> bool {
        dtype == DType::U32 && element_bytes == 4
    }
}

impl Element for u8 {
    fn is_stored_as(dtype: DType, element_bytes: usize) -> bool {
        dtype == DType::U8 && element_bytes == 1
    }
}

/// The elements of a tensor, to be read by a closure on a stream.
pub(super) struct View<T> {
    span: Span,
    marker: PhantomData<T>,
}

/// The elements of a tensor, to be written by a closure on a stream.
pub(super) struct ViewMut<T> {
    view: View<T>,
    rounding: Rounding,
}

impl<T: Element> View<T> {
    /// # Panics
    /// If the tensor is not stored as `T` or leaves its buffer.
    pub(super) fn new(tensor: &Tensor<super::Cpu>) -> Self {
        assert!(
            T::is_stored_as(tensor.dtype(), tensor.element_bytes()),
            "{tensor:?} of {} byte elements is not stored as {}",
            tensor.element_bytes(),
            std::any::type_name::<T>()
        );
        let span = tensor.buffer().span(tensor.offset_bytes(), tensor.bytes());
        assert!(span.offset.is_multiple_of(size_of::<T>()), "{tensor:?} at unaligned offset {}", span.offset);
        Self { span, marker: PhantomData }
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.span.bytes / size_of::<T>()
    }

    /// All elements.
    pub(super) fn slice(&self) -> &[T] {
        self.range(0..self.len())
    }

    /// Some elements, without touching the others: pages of a slab that is written elsewhere meanwhile.
    pub(super) fn range(&self, range: Range<usize>) -> &[T] {
        self.check(&range);
        // SAFETY: inside the span, which lies in live memory aligned for `T`; any bits are a `T`; writers are excluded by
        // the ordering contract and, within one op, by the overlap check of its arguments.
        unsafe { std::slice::from_raw_parts(self.start().add(range.start), range.len()) }
    }

    pub(super) fn span(&self) -> &Span {
        &self.span
    }

    fn start(&self) -> *mut T {
        self.span.start().cast()
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len(), "elements {range:?} of {}", self.len());
    }
}

impl<T: Element> ViewMut<T> {
    /// # Panics
    /// If the tensor is not stored as `T` or leaves its buffer.
    pub(super) fn new(tensor: &Tensor<super::Cpu>) -> Self {
        Self { view: View::new(tensor), rounding: Rounding::of(tensor.dtype()) }
    }

    /// What storing does to a value.
    pub(super) fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// All elements.
    pub(super) fn slice(&mut self) -> &mut [T] {
        let len = self.view.len();
        // SAFETY: as in `View::range`; borrowing `self` mutably keeps a second slice from being made.
        unsafe { std::slice::from_raw_parts_mut(self.view.start(), len) }
    }

    /// Several runs at once, so that they can be written in parallel: pages of a slab.
    ///
    /// # Panics
    /// If two of them overlap.
    pub(super) fn disjoint(&mut self, ranges: &[Range<usize>]) -> Vec<&mut [T]> {
        let mut sorted: Vec<_> = ranges.iter().collect();
        sorted.sort_by_key(|range| range.start);
        for pair in sorted.windows(2) {
            assert!(pair[0].end <= pair[1].start, "elements {:?} and {:?} overlap", pair[0], pair[1]);
        }
        let slice = |range: &Range<usize>| {
            self.view.check(range);
            // SAFETY: as in `slice`; no two ranges share an element, checked above.
            unsafe { std::slice::from_raw_parts_mut(self.view.start().add(range.start), range.len()) }
        };
        ranges.iter().map(slice).collect()
    }

    pub(super) fn span(&self) -> &Span {
        self.view.span()
    }
}
