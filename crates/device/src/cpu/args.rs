//! From an op's tensors to checked views: shapes, dtypes and overlaps are verified in the caller's thread.
//!
//! It must not know what any op computes.

use super::buffer::{Element, Span, View, ViewMut};
use super::{Buffer, Cpu};
use crate::ops::attention::Pages;
use crate::{DType, Stream, Tensor};
use std::cell::RefCell;

/// What an argument may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The device's compute dtype.
    Activation,
    /// Exactly this dtype.
    Exactly(DType),
    /// f32 or bf16.
    F32OrBf16,
    /// Any float.
    Float,
}

/// One call of an op: checks its arguments, then enqueues its work.
pub(super) struct Op<'a> {
    device: &'a Cpu,
    name: &'static str,
    reads: RefCell<Vec<Named>>,
    writes: RefCell<Vec<Named>>,
}

struct Named {
    argument: &'static str,
    span: Span,
}

impl Cpu {
    pub(super) fn op(&self, name: &'static str) -> Op<'_> {
        Op { device: self, name, reads: RefCell::default(), writes: RefCell::default() }
    }
}

impl Op<'_> {
    /// The elements of an input of this shape.
    ///
    /// # Panics
    /// If shape or dtype differ, naming op and argument.
    pub(super) fn read<T: Element>(&self, argument: &'static str, tensor: &Tensor<Cpu>, kind: Kind, shape: &[usize]) -> View<T> {
        self.check(argument, tensor, kind, shape);
        let view = View::new(tensor);
        self.reads.borrow_mut().push(Named { argument, span: view.span().clone() });
        view
    }

    /// The elements of an output of this shape.
    ///
    /// # Panics
    /// If shape or dtype differ, naming op and argument.
    pub(super) fn write<T: Element>(
        &self,
        argument: &'static str,
        tensor: &Tensor<Cpu>,
        kind: Kind,
        shape: &[usize],
    ) -> ViewMut<T> {
        self.check(argument, tensor, kind, shape);
        let view = ViewMut::new(tensor);
        self.writes.borrow_mut().push(Named { argument, span: view.span().clone() });
        view
    }

    /// The slab of pages that are read: element ranges come from [`Paging::range`]. Not part of the overlap check,
    /// because one slab may hold pages that are read and others that are written.
    pub(super) fn read_pages<T: Element>(&self, argument: &'static str, pages: &Pages<'_, Cpu>, kind: Kind) -> (View<T>, Paging) {
        (View::new(pages.slab), self.paging(argument, pages, kind))
    }

    /// The slab of pages that are written.
    pub(super) fn write_pages<T: Element>(
        &self,
        argument: &'static str,
        pages: &Pages<'_, Cpu>,
        kind: Kind,
    ) -> (ViewMut<T>, Paging) {
        (ViewMut::new(pages.slab), self.paging(argument, pages, kind))
    }

    /// Panics naming the op unless `condition`.
    pub(super) fn require(&self, condition: bool, complaint: impl FnOnce() -> String) {
        if !condition {
            panic!("{}: {}", self.name, complaint());
        }
    }

    /// Appends the work to the compute stream.
    ///
    /// # Panics
    /// If an output overlaps another argument.
    pub(super) fn enqueue(self, work: impl FnOnce() + Send + 'static) {
        let (reads, writes) = (self.reads.into_inner(), self.writes.into_inner());
        for (index, write) in writes.iter().enumerate() {
            for other in reads.iter().chain(&writes[index + 1..]) {
                let overlap = write.span.overlaps(&other.span);
                assert!(!overlap, "{}: {} overlaps {}", self.name, write.argument, other.argument);
            }
        }
        self.device.shared.streams.enqueue(Stream::Compute, self.name, work);
    }

    fn check(&self, argument: &str, tensor: &Tensor<Cpu>, kind: Kind, shape: &[usize]) {
        let compute = self.device.options().compute_dtype;
        let dtype_fits = match kind {
            Kind::Activation => tensor.dtype() == compute,
            Kind::Exactly(dtype) => tensor.dtype() == dtype,
            Kind::Float => tensor.dtype().is_float(),
            Kind::F32OrBf16 => matches!(tensor.dtype(), DType::F32 | DType::Bf16),
        };
        self.require(dtype_fits && tensor.shape() == shape, || {
            format!("{argument} is {tensor:?}, wanted {kind:?}{shape:?} (activations are {compute:?})")
        });
    }

    fn paging(&self, argument: &str, pages: &Pages<'_, Cpu>, kind: Kind) -> Paging {
        let shape = pages.slab.shape();
        self.require(shape.len() == 5 && shape[1] == 2, || format!("{argument} is {shape:?}, wanted [slots, 2, G, P, Dh]"));
        self.check(argument, pages.slab, kind, shape);
        for page in pages.refs {
            self.require((page.slot as usize) < shape[0], || format!("{argument} has {} slots, got {page:?}", shape[0]));
        }
        Paging { kv_heads: shape[2], page_rows: shape[3], head_dim: shape[4] }
    }
}

/// Whether two tensors are the same view of the same bytes.
pub(super) fn same_bytes(a: &Tensor<Cpu>, b: &Tensor<Cpu>) -> bool {
    let span = |tensor: &Tensor<Cpu>| Buffer::span(tensor.buffer(), tensor.offset_bytes(), tensor.bytes());
    a.offset_bytes() == b.offset_bytes() && a.bytes() == b.bytes() && span(a).overlaps(&span(b))
}

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Keys, or their gradient.
    Keys,
    /// Values, or their gradient.
    Values,
}

/// Sizes of a slab's pages `[2, G, P, Dh]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Paging {
    /// G.
    pub(super) kv_heads: usize,
    /// P.
    pub(super) page_rows: usize,
    /// Dh.
    pub(super) head_dim: usize,
}

impl Paging {
    /// Elements of the whole page in `slot`: `[2, G, P, Dh]`.
    pub(super) fn page(&self, slot: u32) -> std::ops::Range<usize> {
        let elements = 2 * self.kv_heads * self.tile_elements();
        let start = slot as usize * elements;
        start..start + elements
    }

    /// Elements of one head's keys or values in `slot`: `[P, Dh]`.
    pub(super) fn tile(&self, slot: u32, half: Half, head: usize) -> std::ops::Range<usize> {
        let start = self.page(slot).start + self.tile_in_page(half, head).start;
        start..start + self.tile_elements()
    }

    /// The same, counted from the start of the page.
    pub(super) fn tile_in_page(&self, half: Half, head: usize) -> std::ops::Range<usize> {
        let start = (half as usize * self.kv_heads + head) * self.tile_elements();
        start..start + self.tile_elements()
    }

    fn tile_elements(&self) -> usize {
        self.page_rows * self.head_dim
    }
}
