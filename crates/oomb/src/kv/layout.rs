//! How many pages live where: pure arithmetic, used by the plan and by the store alike.
//!
//! Groups with a small index are read by every later chunk, so the first groups of each layer live on the device for good
//! and the rest stream through a ring of frames, each one group wide, with a home in the host arena.

/// Pages of a group are bits of one word.
pub const MAX_GROUP_PAGES: usize = 64;

/// Sizes that fix the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// L.
    pub num_layers: usize,
    /// Pages of one layer of the longest sequence.
    pub num_pages: usize,
    /// Pages of one chunk.
    pub chunk_pages: usize,
    /// Pages in a group, at most [`MAX_GROUP_PAGES`].
    pub group_pages: usize,
}

impl KvShape {
    /// Groups of one layer.
    pub fn num_groups(&self) -> usize {
        self.num_pages.div_ceil(self.group_pages)
    }

    /// Frames of a store that keeps everything on the device.
    pub fn all_frames(&self) -> usize {
        self.num_layers * self.num_groups()
    }

    /// Frames without which no chunk can be processed: those of its own pages, the group in use, and those under way.
    pub fn min_frames(&self, prefetch_groups: usize) -> usize {
        let own = self.chunk_pages.min(self.num_pages).div_ceil(self.group_pages);
        let straddles = usize::from(!self.chunk_pages.is_multiple_of(self.group_pages));
        (own + straddles + 1 + prefetch_groups).min(self.all_frames())
    }
}

/// A shape and its division into what stays and what streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// The sizes divided here.
    pub shape: KvShape,
    /// Device frames, each [`KvShape::group_pages`] slots.
    pub num_frames: usize,
    /// Groups of each layer that never leave the device.
    pub resident_groups: usize,
    /// Groups whose copies are started ahead of their use.
    pub prefetch_groups: usize,
}

impl KvLayout {
    /// Divides `num_frames` device frames (more than [`KvShape::all_frames`] are not used); `None` where they are fewer
    /// than [`KvShape::min_frames`].
    pub fn new(shape: KvShape, num_frames: usize, prefetch_groups: usize) -> Option<Self> {
        let (all, min) = (shape.all_frames(), shape.min_frames(prefetch_groups));
        if num_frames >= all {
            return Some(Self { shape, num_frames: all, resident_groups: shape.num_groups(), prefetch_groups });
        }
        let spare = num_frames.checked_sub(min)?;
        Some(Self { shape, num_frames, resident_groups: spare / shape.num_layers, prefetch_groups })
    }

    /// Slots of the device slab.
    pub fn device_slots(&self) -> usize {
        self.num_frames * self.shape.group_pages
    }

    /// Slots of the host arena.
    pub fn host_slots(&self) -> usize {
        self.shape.num_layers * (self.shape.num_groups() - self.resident_groups) * self.shape.group_pages
    }
}
