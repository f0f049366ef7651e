//! The optimizer's state wherever it lives: on the device for good, or on the host, from where it passes through a few slots of
//! device memory piece by piece. It must not know the formula of an update, nor which parameter an element belongs to.
//!
//! Every hand-over has an event in both directions: compute waits for the copy in, the copy out for compute, and whatever
//! comes next into a slot for the copy out of it. As a piece always passes through the same slot, and copies out run in order, that also
//! orders a piece's copy in after its own last copy out.

use crate::kv::Traffic;
pub use crate::plan::optimizer::{Part, State};
use crate::plan::optimizer::{STAGING, STAGING_SLOTS};
use oomb_device::ops::moments::BLOCK_ELEMENTS;
use oomb_device::ops::optim::{AdamWState, Moment, RandomBits};
use oomb_device::{Backend, DType, Result, Stream, Tensor};
use std::ops::Range;

/// AdamW's state of all that is trained.
pub struct OptimizerState<B: Backend> {
    state: State,
    /// Of the slab of what is trained.
    elements: usize,
    home: Home<B>,
    /// Between host and device, of all updates so far.
    pub traffic: Traffic,
}

enum Home<B: Backend> {
    Device(Vec<(Part, Tensor<B>)>),
    Host(Streamed<B>),
}

/// Pieces on the host, one after the other, and the slots that they pass through.
struct Streamed<B: Backend> {
    host: B::HostBuffer,
    /// `[slots, bytes]` U8.
    staging: Tensor<B>,
    /// The last copy out of each slot.
    saved: [Option<B::Event>; STAGING_SLOTS],
}

/// The state of consecutive elements, on the device.
pub struct Piece<B: Backend> {
    /// Which elements of the slab; the first is a multiple of [`BLOCK_ELEMENTS`].
    pub elements: Range<usize>,
    /// A flat tensor for each of [`State::parts`].
    pub parts: Vec<(Part, Tensor<B>)>,
}

/// What is done with pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// They are written; what they held is not needed.
    Overwrite,
    /// They are read and written.
    Update,
}

impl<B: Backend> OptimizerState<B> {
    /// Takes the planned buffers of `state` for `elements` elements.
    ///
    /// # Panics
    /// If one is missing.
    pub(super) fn new(
        state: State,
        elements: usize,
        host: Option<B::HostBuffer>,
        mut take: impl FnMut(&str) -> Option<Tensor<B>>,
    ) -> Self {
        let mut must = |name: &str| take(name).unwrap_or_else(|| panic!("the plan has no buffer {name}"));
        let home = match host {
            Some(host) => Home::Host(Streamed { host, staging: must(STAGING), saved: Default::default() }),
            None => Home::Device(state.parts().into_iter().map(|(part, _)| (part, must(part.name()))).collect()),
        };
        Self { state, elements, home, traffic: Traffic::default() }
    }

    /// As planned.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Calls `work` for all pieces in order; it enqueues what it does with a piece on [`Stream::Compute`]. Nothing waits for the
    /// host.
    pub fn for_each(&mut self, device: &B, access: Access, mut work: impl FnMut(Piece<B>)) {
        for index in 0..self.num_pieces() {
            let piece = self.piece(device, index);
            let bytes = self.bytes_before(device, piece.elements.len());
            let run = Run { start: 0, bytes };
            match access {
                Access::Overwrite => self.clear(device, index),
                Access::Update => self.bring(device, index, run),
            }
            work(piece);
            self.save(device, index, run);
            if let Home::Host(_) = self.home {
                self.traffic.in_bytes += if access == Access::Update { bytes } else { 0 };
                self.traffic.out_bytes += bytes;
            }
        }
    }

    /// Calls `work` for the runs of `part` that belong to `elements`, in order. It must wait for what it enqueues, as a download
    /// does.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn read(
        &self,
        device: &B,
        part: Part,
        elements: &Range<usize>,
        mut work: impl FnMut(Tensor<B>) -> Result<()>,
    ) -> Result<()> {
        for (index, tensor) in self.runs(device, part, elements) {
            self.bring(device, index, self.run_of(index, &tensor));
            work(tensor)?;
        }
        Ok(())
    }

    /// Overwrites the runs of `part` that belong to `elements`: `work` is given each with its range of that part's elements,
    /// counted from the first.
    pub fn write(&mut self, device: &B, part: Part, elements: &Range<usize>, mut work: impl FnMut(&mut Tensor<B>, Range<usize>)) {
        let mut done = 0;
        for (index, mut tensor) in self.runs(device, part, elements) {
            self.clear(device, index);
            let len = tensor.len();
            work(&mut tensor, done..done + len);
            done += len;
            self.save(device, index, self.run_of(index, &tensor));
        }
    }

    fn num_pieces(&self) -> usize {
        self.elements.div_ceil(self.state.piece_elements)
    }

    /// Where a piece is while it is on the device.
    fn piece(&self, device: &B, index: usize) -> Piece<B> {
        let start = index * self.state.piece_elements;
        let elements = start..self.elements.min(start + self.state.piece_elements);
        let parts = match &self.home {
            Home::Device(parts) => parts.clone(),
            Home::Host(streamed) => {
                let slot = streamed.slot(index);
                let mut offset = slot.offset_bytes();
                let place = |(part, dtype): (Part, DType)| {
                    let shape = [elements.len() / part.stride()];
                    let tensor = Tensor::new(slot.buffer().clone(), offset, dtype, device.element_bytes(dtype), &shape);
                    offset += tensor.bytes();
                    (part, tensor)
                };
                self.state.parts().into_iter().map(place).collect()
            }
        };
        Piece { elements, parts }
    }

    /// The runs of a part that belong to `elements`, with the index of the piece.
    fn runs(&self, device: &B, part: Part, elements: &Range<usize>) -> Vec<(usize, Tensor<B>)> {
        let pieces = elements.start / self.state.piece_elements..elements.end.div_ceil(self.state.piece_elements);
        let run = |index| {
            let piece = self.piece(device, index);
            let within = elements.start.max(piece.elements.start)..elements.end.min(piece.elements.end);
            let found = piece.narrow(within).parts.into_iter().find(|(known, _)| *known == part);
            (index, found.unwrap_or_else(|| panic!("the optimizer's state has no {part:?}")).1)
        };
        pieces.map(run).collect()
    }

    /// Bytes on the host of the first `elements` elements.
    fn bytes_before(&self, device: &B, elements: usize) -> u64 {
        let bytes = |(part, dtype): (Part, DType)| (elements / part.stride() * device.element_bytes(dtype)) as u64;
        self.state.parts().into_iter().map(bytes).sum()
    }

    /// Where a tensor of a piece lies in it.
    fn run_of(&self, index: usize, tensor: &Tensor<B>) -> Run {
        match &self.home {
            Home::Device(_) => Run { start: 0, bytes: 0 },
            Home::Host(streamed) => {
                Run { start: tensor.offset_bytes() - streamed.slot(index).offset_bytes(), bytes: tensor.bytes() }
            }
        }
    }

    /// Makes compute wait until a piece's slot may be overwritten.
    fn clear(&self, device: &B, index: usize) {
        let Home::Host(streamed) = &self.home else { return };
        if let Some(saved) = &streamed.saved[index % STAGING_SLOTS] {
            device.wait(Stream::Compute, saved);
        }
    }

    /// Copies a run of a piece into its slot and makes compute wait for it.
    fn bring(&self, device: &B, index: usize, run: Run) {
        let Home::Host(streamed) = &self.home else { return };
        if let Some(saved) = &streamed.saved[index % STAGING_SLOTS] {
            device.wait(Stream::In, saved);
        }
        let from = self.bytes_before(device, index * self.state.piece_elements) + run.start;
        let slot = streamed.slot(index);
        device.copy_in(slot.buffer(), slot.offset_bytes() + run.start, &streamed.host, from, run.bytes);
        device.wait(Stream::Compute, &device.record(Stream::In));
    }

    /// Copies a run of a piece from its slot to the host, after what compute has enqueued.
    fn save(&mut self, device: &B, index: usize, run: Run) {
        let to = self.bytes_before(device, index * self.state.piece_elements) + run.start;
        let Home::Host(streamed) = &mut self.home else { return };
        device.wait(Stream::Out, &device.record(Stream::Compute));
        let slot = streamed.slot(index);
        device.copy_out(&streamed.host, to, slot.buffer(), slot.offset_bytes() + run.start, run.bytes);
        streamed.saved[index % STAGING_SLOTS] = Some(device.record(Stream::Out));
    }
}

/// Bytes of a piece.
#[derive(Clone, Copy)]
struct Run {
    start: u64,
    bytes: u64,
}

impl<B: Backend> Streamed<B> {
    fn slot(&self, piece: usize) -> Tensor<B> {
        self.staging.index(piece % STAGING_SLOTS)
    }
}

impl<B: Backend> Piece<B> {
    /// The state of some of its elements, the first of which is a multiple of [`BLOCK_ELEMENTS`].
    ///
    /// # Panics
    /// If it has them not.
    pub fn narrow(&self, elements: Range<usize>) -> Self {
        assert!(elements.start.is_multiple_of(BLOCK_ELEMENTS), "elements {elements:?} start within a block");
        let (start, end) = (elements.start - self.elements.start, elements.end - self.elements.start);
        let part =
            |(part, tensor): &(Part, Tensor<B>)| (*part, tensor.narrow(start / part.stride()..end.div_ceil(part.stride())));
        Self { parts: self.parts.iter().map(part).collect(), elements }
    }

    /// As AdamW takes it; `seed` of what is rounded stochastically.
    pub fn adamw(&mut self, seed: u64) -> AdamWState<'_, B> {
        let (mut master, mut moments, mut scales) = (None, [None, None], [None, None]);
        for (part, tensor) in &mut self.parts {
            match part {
                Part::Master => master = Some(tensor),
                Part::M => moments[0] = Some(tensor),
                Part::V => moments[1] = Some(tensor),
                Part::MScales => scales[0] = Some(tensor),
                Part::VScales => scales[1] = Some(tensor),
            }
        }
        let ([Some(m), Some(v)], [m_scales, v_scales]) = (moments, scales) else { panic!("every state has both moments") };
        AdamWState {
            master,
            m: Moment { values: m, scales: m_scales },
            v: Moment { values: v, scales: v_scales },
            random: RandomBits { seed, first: self.elements.start as u64 },
        }
    }
}
