//! Which positions and pages a chunk sees: all, or a sliding window. It must not know where pages are.

use std::ops::Range;

/// The choice of visible positions. Pages chosen by score, one list per query page, would be a further variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// Every earlier position of the document.
    All,
    /// The last so many positions, the token's own included.
    Window(usize),
}

impl Selection {
    /// Moves the first visible position of each token up to the window's edge; the tokens stand at `start` and after.
    pub fn narrow(self, start: u32, first: &mut [u32]) {
        let Self::Window(tokens) = self else { return };
        for (position, first) in (start + 1..).zip(first) {
            let edge = position.saturating_sub(u32::try_from(tokens).unwrap_or(u32::MAX));
            *first = edge.max(*first);
        }
    }
}

/// Pages that hold what the tokens of a chunk see: its first token sees `first` and after, it ends before `end`.
pub fn visible_pages(first: u32, end: usize, page_tokens: usize) -> Range<usize> {
    first as usize / page_tokens..end.div_ceil(page_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_and_document_meet_in_one_number() {
        let mut first = vec![0, 0, 0, 0, 4, 4, 4, 4, 4];
        Selection::Window(3).narrow(0, &mut first);
        assert_eq!(first, [0, 0, 0, 1, 4, 4, 4, 5, 6]);
        assert_eq!(visible_pages(first[6], 9, 2), 2..5);
        assert_eq!(visible_pages(first[3], 4, 2), 0..2);
    }
}
