//! The page store: where every page of keys, values and their gradients is, and when it moves.
//!
//! It must not know the model: it hands out plain page lists ([`PageRef`]) and learns from the schedule, ahead of time,
//! which pages will be read in which order. Pages of one layer move in aligned groups; a page exists from the moment its
//! chunk appends it until its chunk's backward is done.

mod cache;
pub mod layout;
pub mod select;

use cache::Cache;
pub use layout::{KvLayout, KvShape};
use oomb_device::ops::attention::{PageRef, Part};
use oomb_device::{Backend, Tensor};
use std::collections::VecDeque;
use std::ops::Range;

/// Whether an access reads keys and values only, or adds to their gradients as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Reads k, v.
    Forward,
    /// Reads k, v and adds to dk, dv.
    Backward,
}

/// One attention call to come: all pages of one layer that one chunk will see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Layer.
    pub layer: usize,
    /// Page indices.
    pub pages: Range<usize>,
    /// What is done with them.
    pub mode: Mode,
}

/// Pages that are on the device now and stay there until [`Store::done`].
#[derive(Debug)]
pub struct Group {
    /// k, v.
    pub kv: Vec<PageRef>,
    /// dk, dv of the same pages in the same order; empty in [`Mode::Forward`].
    pub grads: Vec<PageRef>,
    /// Where the group stands among the groups of its access.
    pub part: Part,
    layer: usize,
    batches: Vec<Batch>,
}

/// Some pages of one aligned group: bit `i` of `mask` is page `group · group_pages + i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Batch {
    group: usize,
    mask: u64,
}

/// Memory that the store works in, as the plan allocated it.
pub struct KvMemory<B: Backend> {
    /// `[slots, 2, G, P, Dh]`.
    pub slab: Tensor<B>,
    /// Host home of the pages that do not stay on the device; absent where all do.
    pub host: Option<B::HostBuffer>,
}

/// What moved between host and device, and what need not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Host to device.
    pub in_bytes: u64,
    /// Device to host.
    pub out_bytes: u64,
    /// Pages of keys and values that attention calls read.
    pub pages_read: u64,
    /// How many of those had to come from the host for it.
    pub pages_fetched: u64,
}

impl Traffic {
    /// Share of the pages read that were on the device already; `None` where none was read.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.pages_read > 0).then(|| 1.0 - self.pages_fetched as f64 / self.pages_read as f64)
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            in_bytes: self.in_bytes + other.in_bytes,
            out_bytes: self.out_bytes + other.out_bytes,
            pages_read: self.pages_read + other.pages_read,
            pages_fetched: self.pages_fetched + other.pages_fetched,
        }
    }
}

impl std::ops::Sub for Traffic {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            in_bytes: self.in_bytes - earlier.in_bytes,
            out_bytes: self.out_bytes - earlier.out_bytes,
            pages_read: self.pages_read - earlier.pages_read,
            pages_fetched: self.pages_fetched - earlier.pages_fetched,
        }
    }
}

/// Keys, values and their gradients of one sequence.
pub struct Store<B: Backend> {
    device: B,
    shape: KvShape,
    call_groups: usize,
    prefetch_groups: usize,
    kv: Cache<B>,
    grads: Option<Cache<B>>,
    queue: VecDeque<Access>,
    /// Batches of the access in progress that are still to come, and how many there were.
    pending: VecDeque<Vec<Batch>>,
    started: Option<Access>,
    first: bool,
    /// Streamed batches ahead of the cursor that are pinned already, in order.
    prefetched: VecDeque<(usize, Mode, Batch)>,
}

impl<B: Backend> Store<B> {
    /// A store over `kv` and, for training, `grads`, both laid out as `layout` says.
    pub fn new(device: &B, layout: &KvLayout, kv: KvMemory<B>, grads: Option<KvMemory<B>>) -> Self {
        let cache = |memory: KvMemory<B>| Cache::new(layout, memory);
        Self {
            device: device.clone(),
            shape: layout.shape,
            call_groups: layout.call_groups,
            prefetch_groups: layout.prefetch_groups,
            kv: cache(kv),
            grads: grads.map(cache),
            queue: VecDeque::new(),
            pending: VecDeque::new(),
            started: None,
            first: true,
            prefetched: VecDeque::new(),
        }
    }

    /// The slab of k, v.
    pub fn slab(&self) -> &Tensor<B> {
        &self.kv.slab
    }

    /// The slab of dk, dv.
    ///
    /// # Panics
    /// If the store was made without gradients.
    pub fn grad_slab(&self) -> &Tensor<B> {
        &self.grads.as_ref().expect("a store for training").slab
    }

    /// Starts a sequence: forgets all pages and takes the accesses to come, in order.
    pub fn begin(&mut self, accesses: Vec<Access>) {
        self.clear();
        self.queue = accesses.into();
    }

    /// Goes on with the sequence: its pages stay, more accesses come.
    pub fn announce(&mut self, accesses: Vec<Access>) {
        self.queue.extend(accesses);
    }

    /// Forgets all pages.
    pub fn clear(&mut self) {
        while let Some((layer, mode, batch)) = self.prefetched.pop_front() {
            self.unpin(layer, mode, batch);
        }
        self.queue.clear();
        self.pending.clear();
        self.started = None;
        self.kv.clear();
        if let Some(grads) = &mut self.grads {
            grads.clear();
        }
    }

    /// Makes room for a chunk's pages of `layer`. Of a page that exists already the rows are kept, and more are added; the
    /// content of a new one is undefined until it is written.
    pub fn append(&mut self, layer: usize, pages: Range<usize>) -> Vec<PageRef> {
        let batches = self.batches(pages);
        for batch in &batches {
            let free = self.kv.pin(&self.device, layer, *batch);
            assert!(free, "no device slot for new pages of layer {layer}, {batch:?}: the plan is too small");
            self.kv.create(&self.device, layer, *batch);
        }
        batches.iter().flat_map(|batch| self.kv.refs(layer, *batch)).collect()
    }

    /// The rows of the last [`Self::append`] have been written by what is now enqueued.
    pub fn appended(&mut self, layer: usize, pages: Range<usize>) {
        for batch in self.batches(pages) {
            self.kv.unpin(&self.device, layer, batch.group, batch.mask);
        }
    }

    /// The next pages of the access in progress, on the device; `None` at the access's end. The call after that starts
    /// the next access.
    ///
    /// # Panics
    /// If the schedule asks for more accesses than it announced.
    pub fn next_group(&mut self) -> Option<Group> {
        let access = match self.started.take() {
            Some(access) => access,
            None => self.start_access(),
        };
        let batches = self.pending.pop_front()?;
        let last = self.pending.is_empty();
        let part = match (std::mem::replace(&mut self.first, false), last) {
            (true, true) => Part::Only,
            (true, false) => Part::First,
            (false, true) => Part::Last,
            (false, false) => Part::Middle,
        };
        let mut group = Group { kv: Vec::new(), grads: Vec::new(), part, layer: access.layer, batches };
        for &batch in &group.batches {
            self.acquire(access.layer, access.mode, batch);
            group.kv.extend(self.kv.refs(access.layer, batch));
            if let (Mode::Backward, Some(grads)) = (access.mode, &mut self.grads) {
                group.grads.extend(grads.refs(access.layer, batch));
            }
        }
        self.started = Some(access);
        self.prefetch();
        Some(group)
    }

    /// What is now enqueued is the last use of `group`.
    pub fn done(&mut self, group: Group) {
        let mode = if group.grads.is_empty() { Mode::Forward } else { Mode::Backward };
        for batch in group.batches {
            self.unpin(group.layer, mode, batch);
        }
    }

    /// The complete gradients of a chunk's own pages.
    ///
    /// # Panics
    /// If the store was made without gradients.
    pub fn own_grads(&mut self, layer: usize, pages: Range<usize>) -> Vec<PageRef> {
        let batches = self.batches(pages);
        let grads = self.grads.as_mut().expect("a store for training");
        for batch in &batches {
            let free = grads.pin(&self.device, layer, *batch);
            assert!(free, "no device slot for gradients of layer {layer}, {batch:?}: the plan is too small");
            grads.ready_or_zero(&self.device, layer, *batch);
        }
        batches.iter().flat_map(|batch| grads.refs(layer, *batch)).collect()
    }

    /// Ends a chunk's own pages of `layer`, gradients included, after [`Self::own_grads`] and what is now enqueued.
    pub fn free(&mut self, layer: usize, pages: Range<usize>) {
        for batch in self.batches(pages) {
            if let Some(grads) = &mut self.grads {
                grads.unpin(&self.device, layer, batch.group, 0);
                grads.free(&self.device, layer, batch);
            }
            self.kv.free(&self.device, layer, batch);
        }
    }

    /// What moved so far; pages counted are those of keys and values.
    pub fn traffic(&self) -> Traffic {
        let grads = self.grads.as_ref().map_or_else(Traffic::default, |grads| grads.traffic);
        self.kv.traffic + Traffic { pages_read: 0, pages_fetched: 0, ..grads }
    }

    fn start_access(&mut self) -> Access {
        let access = self.queue.pop_front().expect("the schedule announces every access");
        self.pending = self.calls(&access).into();
        self.first = true;
        access
    }

    /// Splits an access into calls: all groups that live on the device together, streamed groups so many at a time.
    fn calls(&self, access: &Access) -> Vec<Vec<Batch>> {
        let (stay, stream): (Vec<_>, Vec<_>) =
            self.batches(access.pages.clone()).into_iter().partition(|batch| self.kv.stays(batch.group));
        let resident = (!stay.is_empty()).then_some(stay);
        resident.into_iter().chain(stream.chunks(self.call_groups).map(<[Batch]>::to_vec)).collect()
    }

    fn batches(&self, pages: Range<usize>) -> Vec<Batch> {
        let size = self.shape.group_pages;
        let groups = pages.start / size..pages.end.div_ceil(size);
        groups
            .map(|group| {
                let (lo, hi) = (pages.start.max(group * size) % size, pages.end.min((group + 1) * size) - group * size);
                Batch { group, mask: mask_of(lo..hi) }
            })
            .collect()
    }

    fn acquire(&mut self, layer: usize, mode: Mode, batch: Batch) {
        if self.prefetched.front() == Some(&(layer, mode, batch)) {
            self.prefetched.pop_front();
        } else {
            assert!(self.try_pin(layer, mode, batch), "no device slot for layer {layer}, {batch:?}: the plan is too small");
        }
        self.kv.traffic.pages_read += u64::from(batch.mask.count_ones());
        self.kv.ready(&self.device, layer, batch);
        if let (Mode::Backward, Some(grads)) = (mode, &mut self.grads) {
            grads.ready_or_zero(&self.device, layer, batch);
        }
    }

    /// Starts the copies of streamed groups ahead of the cursor, as far as there are slots and the pages exist.
    fn prefetch(&mut self) {
        let ahead = self.started.iter().flat_map(|access| self.pending.iter().map(move |call| (access, call.clone())));
        let later = self.queue.iter().take(2 * self.prefetch_groups + 2);
        let later = later.flat_map(|access| self.calls(access).into_iter().map(move |call| (access, call)));
        let wanted: Vec<_> = ahead
            .chain(later)
            .flat_map(|(access, call)| call.into_iter().map(move |batch| (access.layer, access.mode, batch)))
            .filter(|(_, _, batch)| !self.kv.stays(batch.group))
            .take(self.prefetch_groups)
            .collect();
        for (layer, mode, batch) in wanted.into_iter().skip(self.prefetched.len()) {
            if !self.kv.exists(layer, batch) || !self.try_pin(layer, mode, batch) {
                return;
            }
            self.prefetched.push_back((layer, mode, batch));
        }
    }

    fn try_pin(&mut self, layer: usize, mode: Mode, batch: Batch) -> bool {
        if !self.kv.pin(&self.device, layer, batch) {
            return false;
        }
        if let (Mode::Backward, Some(grads)) = (mode, &mut self.grads)
            && !grads.pin(&self.device, layer, batch)
        {
            self.kv.unpin(&self.device, layer, batch.group, 0);
            return false;
        }
        true
    }

    fn unpin(&mut self, layer: usize, mode: Mode, batch: Batch) {
        self.kv.unpin(&self.device, layer, batch.group, 0);
        if let (Mode::Backward, Some(grads)) = (mode, &mut self.grads) {
            grads.unpin(&self.device, layer, batch.group, batch.mask);
        }
    }
}

fn mask_of(pages: Range<usize>) -> u64 {
    let below = |n: usize| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
    below(pages.end) & !below(pages.start)
}
