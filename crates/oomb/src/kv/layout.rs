//! How many pages live where: pure arithmetic, used by the plan and by the store alike.
//!
//! Groups with a small index are read by every later chunk, so the first groups of each layer live on the device for good
//! and the rest stream through a ring of frames, each one group wide, with a home in the host arena.

/// Pages of a group are bits of one word.
pub const MAX_GROUP_PAGES: usize = 64;

/// Streamed pages that one attention call should have: a call of the gradient has a thread block for each page and KV head,
/// and 4 heads of 256 fill any GPU several times; a call of the forward reads and writes the carried output, which 256 pages
/// of 128 keys make less than a hundredth of its time (8192 queries, head dim 128, H200).
const CALL_PAGES: usize = 256;

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
    /// Streamed groups that one attention call takes together.
    pub call_groups: usize,
    /// Groups whose copies are started ahead of their use: a whole call at least, unless none.
    pub prefetch_groups: usize,
}

impl KvLayout {
    /// Divides `num_frames` device frames (more than [`KvShape::all_frames`] are not used); `None` where they are fewer
    /// than [`KvShape::min_frames`]. What is beyond that goes to larger calls first, each with as much in flight behind it,
    /// and then to groups that stay.
    pub fn new(shape: KvShape, num_frames: usize, prefetch_groups: usize) -> Option<Self> {
        let (all, min) = (shape.all_frames(), shape.min_frames(prefetch_groups));
        let layout = Self { shape, num_frames, resident_groups: shape.num_groups(), call_groups: 1, prefetch_groups };
        if num_frames >= all {
            return Some(Self { num_frames: all, ..layout });
        }
        let spare = num_frames.checked_sub(min)?;
        let wanted = CALL_PAGES.div_ceil(shape.group_pages).min(shape.num_groups());
        let frames_of = |calls: usize| {
            let in_flight = if prefetch_groups == 0 { 0 } else { calls.max(prefetch_groups) };
            (calls + in_flight) - (1 + prefetch_groups)
        };
        let call_groups = (1..=wanted).rev().find(|&calls| frames_of(calls) <= spare)?;
        let prefetch_groups = if prefetch_groups == 0 { 0 } else { prefetch_groups.max(call_groups) };
        let resident_groups = (spare - frames_of(call_groups)) / shape.num_layers;
        Some(Self { resident_groups, call_groups, prefetch_groups, ..layout })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_frames_make_calls_larger_and_then_stay() {
        let shape = KvShape { num_layers: 4, num_pages: 4096, chunk_pages: 64, group_pages: 16 };
        let min = shape.min_frames(2);
        assert_eq!(min, 4 + 1 + 2);
        let layout = |frames| KvLayout::new(shape, frames, 2).unwrap();
        assert!(KvLayout::new(shape, min - 1, 2).is_none());
        for (frames, call, prefetch, resident) in
            [(min, 1, 2, 0), (min + 1, 2, 2, 0), (min + 3, 3, 3, 0), (min + 29, 16, 16, 0), (min + 29 + 8, 16, 16, 2)]
        {
            let got = layout(frames);
            assert_eq!(
                (got.call_groups, got.prefetch_groups, got.resident_groups),
                (call, prefetch, resident),
                "{frames} frames"
            );
        }
        assert_eq!(layout(shape.all_frames()).resident_groups, 256);
        // On demand stays on demand.
        let demand = KvLayout::new(shape, shape.min_frames(0) + 3, 0).unwrap();
        assert_eq!((demand.call_groups, demand.prefetch_groups), (4, 0));
    }
}
