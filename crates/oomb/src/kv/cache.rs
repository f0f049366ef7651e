//! Frames of one slab (keys and values, or their gradients): which page is in which slot, and the copies that make it so.
//!
//! It must not know what the pages mean nor who asks. Every hand-over has an event in both directions: compute waits for
//! a copy in; a copy in waits for compute, for the copy out that emptied the slot and for the one that filled the host slot;
//! a copy out waits for compute, which has waited for the copy in that last read the host slot.

use super::layout::MAX_GROUP_PAGES;
use super::{Batch, KvLayout, KvMemory, Traffic};
use oomb_device::ops::attention::PageRef;
use oomb_device::{Backend, Stream, Tensor};
use std::collections::BTreeMap;

/// Slots of one group. Bits of the masks are pages of the group.
struct Frame<B: Backend> {
    /// Layer and group that live here now.
    content: Option<(usize, usize)>,
    /// Pages whose values are here (or on their way in).
    valid: u64,
    /// Pages that differ from their host copy.
    dirty: u64,
    pins: u32,
    last_use: u64,
    /// Compute's last use of these slots.
    computed: Option<B::Event>,
    /// The last copy in, until compute has been told to wait for it.
    loaded: Option<B::Event>,
    /// The last copy out; nobody may overwrite the slots before.
    saved: Option<B::Event>,
}

/// What is known of a group wherever it is.
struct Home<B: Backend> {
    frame: Option<usize>,
    /// Pages with a valid copy in the host arena.
    on_host: u64,
    /// The last copy out to the arena.
    saved: Option<B::Event>,
}

/// The frames of one slab.
pub(super) struct Cache<B: Backend> {
    pub slab: Tensor<B>,
    pub traffic: Traffic,
    layout: KvLayout,
    host: Option<B::HostBuffer>,
    frames: Vec<Frame<B>>,
    homes: Vec<Home<B>>,
    free: Vec<usize>,
    /// Frames that may be evicted, by last use.
    idle: BTreeMap<u64, usize>,
    clock: u64,
}

impl<B: Backend> Cache<B> {
    pub fn new(layout: &KvLayout, memory: KvMemory<B>) -> Self {
        assert_eq!(memory.slab.rows(), layout.device_slots(), "slots of the slab as planned");
        assert!(layout.shape.group_pages <= MAX_GROUP_PAGES, "a group has at most {MAX_GROUP_PAGES} pages");
        let frame =
            |_| Frame { content: None, valid: 0, dirty: 0, pins: 0, last_use: 0, computed: None, loaded: None, saved: None };
        let home = |_| Home { frame: None, on_host: 0, saved: None };
        Self {
            slab: memory.slab,
            traffic: Traffic::default(),
            layout: *layout,
            host: memory.host,
            frames: (0..layout.num_frames).map(frame).collect(),
            homes: (0..layout.shape.all_frames()).map(home).collect(),
            free: (0..layout.num_frames).rev().collect(),
            idle: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Whether a group never leaves the device once it is there.
    pub fn stays(&self, group: usize) -> bool {
        group < self.layout.resident_groups
    }

    /// Whether all of these pages have been written.
    pub fn exists(&self, layer: usize, batch: Batch) -> bool {
        let home = &self.homes[self.home_index(layer, batch.group)];
        let on_device = home.frame.map_or(0, |frame| self.frames[frame].valid);
        (home.on_host | on_device) & batch.mask == batch.mask
    }

    /// Gives the group a frame, starts copies of those of its pages that are on the host only, and holds the frame.
    /// False where every frame is held.
    pub fn pin(&mut self, device: &B, layer: usize, batch: Batch) -> bool {
        let home = self.home_index(layer, batch.group);
        let Some(index) = self.homes[home].frame.or_else(|| self.claim(device, layer, batch.group)) else { return false };
        self.clock += 1;
        let frame = &mut self.frames[index];
        if frame.pins == 0 {
            self.idle.remove(&frame.last_use);
        }
        frame.pins += 1;
        frame.last_use = self.clock;
        let missing = batch.mask & !frame.valid & self.homes[home].on_host;
        if missing != 0 {
            self.load(device, index, home, missing);
        }
        true
    }

    /// Makes compute wait until these pages are there.
    ///
    /// # Panics
    /// If one was never written.
    pub fn ready(&mut self, device: &B, layer: usize, batch: Batch) {
        let frame = self.frame_of(layer, batch.group);
        let valid = frame.valid;
        assert!(valid & batch.mask == batch.mask, "layer {layer}, {batch:?}: of these pages only {valid:#b} exist");
        if let Some(event) = frame.loaded.take() {
            device.wait(Stream::Compute, &event);
        }
    }

    /// Makes compute wait until these pages are there; those that were never written start as zeros.
    pub fn ready_or_zero(&mut self, device: &B, layer: usize, batch: Batch) {
        let mask = batch.mask & !self.frame_of(layer, batch.group).valid;
        if mask != 0 {
            self.create(device, layer, Batch { mask, ..batch });
            let first = self.first_slot(layer, batch.group);
            for (page, run) in runs(mask) {
                device.fill(&mut self.slab.narrow(first + page..first + page + run), 0.0);
            }
        }
        self.ready(device, layer, batch);
    }

    /// Declares pages of a held group that compute is about to write, after what is under way to or from them.
    pub fn create(&mut self, device: &B, layer: usize, batch: Batch) {
        let frame = self.frame_of(layer, batch.group);
        for event in [frame.saved.take(), frame.loaded.take()].into_iter().flatten() {
            device.wait(Stream::Compute, &event);
        }
        frame.valid |= batch.mask;
        frame.dirty |= batch.mask;
    }

    /// Lets go of a group after what compute has enqueued; `written` pages differ from their host copies.
    pub fn unpin(&mut self, device: &B, layer: usize, group: usize, written: u64) {
        let stays = self.stays(group);
        let index = self.frame_index(layer, group);
        let frame = &mut self.frames[index];
        assert!(frame.pins > 0, "layer {layer}, group {group} is not held");
        frame.pins -= 1;
        frame.dirty |= written & frame.valid;
        frame.computed = Some(device.record(Stream::Compute));
        if frame.pins == 0 && !stays {
            self.idle.insert(frame.last_use, index);
        }
    }

    /// The slots of a held group's pages.
    pub fn refs(&self, layer: usize, batch: Batch) -> Vec<PageRef> {
        let (first, size) = (self.first_slot(layer, batch.group), self.layout.shape.group_pages);
        let pages = (0..size).filter(|page| batch.mask >> page & 1 == 1);
        pages.map(|page| PageRef { slot: to_u32(first + page), index: to_u32(batch.group * size + page) }).collect()
    }

    /// Forgets pages, on the device and on the host, after what compute has enqueued.
    pub fn free(&mut self, device: &B, layer: usize, batch: Batch) {
        let home = self.home_index(layer, batch.group);
        self.homes[home].on_host &= !batch.mask;
        let Some(index) = self.homes[home].frame else { return };
        let first = index * self.layout.shape.group_pages;
        for (page, run) in runs(batch.mask & self.frames[index].valid) {
            device.poison(&mut self.slab.narrow(first + page..first + page + run));
        }
        let frame = &mut self.frames[index];
        frame.computed = Some(device.record(Stream::Compute));
        frame.valid &= !batch.mask;
        frame.dirty &= !batch.mask;
        if frame.valid == 0 && frame.pins == 0 {
            frame.content = None;
            self.homes[home].frame = None;
            self.idle.remove(&frame.last_use);
            self.free.push(index);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for frame in &mut self.frames {
            (frame.content, frame.valid, frame.dirty, frame.pins) = (None, 0, 0, 0);
        }
        for home in &mut self.homes {
            (home.frame, home.on_host) = (None, 0);
        }
        self.idle.clear();
        self.free = (0..self.frames.len()).rev().collect();
    }

    /// An empty frame, or the least recently used one that is neither held nor resident for good.
    fn claim(&mut self, device: &B, layer: usize, group: usize) -> Option<usize> {
        let index = self.free.pop().or_else(|| {
            let (_, index) = self.idle.pop_first()?;
            self.evict(device, index);
            Some(index)
        })?;
        self.frames[index].content = Some((layer, group));
        let home = self.home_index(layer, group);
        self.homes[home].frame = Some(index);
        Some(index)
    }

    fn evict(&mut self, device: &B, index: usize) {
        let (layer, group) = self.frames[index].content.take().expect("an idle frame has a content");
        let home = self.home_index(layer, group);
        self.homes[home].frame = None;
        self.frames[index].valid = 0;
        let dirty = std::mem::take(&mut self.frames[index].dirty);
        if dirty == 0 {
            return;
        }
        let host = self.host.as_ref().expect("groups that stream have a home on the host");
        if let Some(event) = &self.frames[index].computed {
            device.wait(Stream::Out, event);
        }
        let page_bytes = self.page_bytes();
        for (page, run) in runs(dirty) {
            let bytes = run as u64 * page_bytes;
            let host_offset = (self.host_slot(layer, group) + page) as u64 * page_bytes;
            device.copy_out(host, host_offset, self.slab.buffer(), self.device_offset(index, page), bytes);
            self.traffic.out_bytes += bytes;
        }
        let event = device.record(Stream::Out);
        self.homes[home].on_host |= dirty;
        self.homes[home].saved = Some(event.clone());
        self.frames[index].saved = Some(event);
    }

    fn load(&mut self, device: &B, index: usize, home: usize, missing: u64) {
        let (layer, group) = self.frames[index].content.expect("a frame is claimed before it is loaded");
        let host = self.host.as_ref().expect("groups that stream have a home on the host");
        let frame = &self.frames[index];
        for event in [&frame.computed, &frame.saved, &self.homes[home].saved].into_iter().flatten() {
            device.wait(Stream::In, event);
        }
        self.traffic.pages_fetched += u64::from(missing.count_ones());
        let page_bytes = self.page_bytes();
        for (page, run) in runs(missing) {
            let bytes = run as u64 * page_bytes;
            let host_offset = (self.host_slot(layer, group) + page) as u64 * page_bytes;
            device.copy_in(self.slab.buffer(), self.device_offset(index, page), host, host_offset, bytes);
            self.traffic.in_bytes += bytes;
        }
        self.frames[index].loaded = Some(device.record(Stream::In));
        self.frames[index].valid |= missing;
    }

    fn page_bytes(&self) -> u64 {
        self.slab.bytes() / self.slab.rows() as u64
    }

    fn device_offset(&self, frame: usize, page: usize) -> u64 {
        let slot = frame * self.layout.shape.group_pages + page;
        self.slab.offset_bytes() + slot as u64 * self.page_bytes()
    }

    fn host_slot(&self, layer: usize, group: usize) -> usize {
        let streamed = self.layout.shape.num_groups() - self.layout.resident_groups;
        (layer * streamed + group - self.layout.resident_groups) * self.layout.shape.group_pages
    }

    fn home_index(&self, layer: usize, group: usize) -> usize {
        layer * self.layout.shape.num_groups() + group
    }

    fn frame_index(&self, layer: usize, group: usize) -> usize {
        self.homes[self.home_index(layer, group)].frame.expect("only groups with a frame are asked for")
    }

    fn frame_of(&mut self, layer: usize, group: usize) -> &mut Frame<B> {
        let index = self.frame_index(layer, group);
        &mut self.frames[index]
    }

    fn first_slot(&self, layer: usize, group: usize) -> usize {
        self.frame_index(layer, group) * self.layout.shape.group_pages
    }
}

/// Runs of set bits as (first, length), so that consecutive pages are one copy.
fn runs(mut mask: u64) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        if mask == 0 {
            return None;
        }
        let first = mask.trailing_zeros() as usize;
        let run = (mask >> first).trailing_ones() as usize;
        let above = first + run;
        mask = if above == 64 { 0 } else { mask >> above << above };
        Some((first, run))
    })
}

fn to_u32(value: usize) -> u32 {
    u32::try_from(value).expect("slots and page indices fit 32 bits: 2^32 pages of 128 tokens")
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn runs_cover_each_set_bit_once() {
        for mask in [0, 1, u64::MAX, 0b1011_0111, 1 << 63, u64::MAX << 1, 0x8000_0000_0000_0001] {
            let mut seen = 0u64;
            for (first, run) in runs(mask) {
                for bit in first..first + run {
                    assert_eq!(seen >> bit & 1, 0, "{mask:#b}");
                    seen |= 1 << bit;
                }
            }
            assert_eq!(seen, mask);
        }
    }
}
