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
    /// Pairs of a token and one that it sees, in a document of so many tokens.
    pub fn visible_pairs(self, tokens: usize) -> f64 {
        let (tokens, window) = match self {
            Self::All => (tokens as f64, tokens as f64),
            Self::Window(window) => (tokens as f64, window.min(tokens) as f64),
        };
        // The first `window` tokens see a triangle, each later one `window` keys.
        window * (window + 1.0) / 2.0 + (tokens - window) * window
    }

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
    fn a_window_is_a_triangle_and_a_band() {
        for (tokens, window, pairs) in [(5, 2, 9.0), (5, 5, 15.0), (5, 9, 15.0), (5, 1, 5.0)] {
            assert_eq!(Selection::Window(window).visible_pairs(tokens), pairs);
        }
        assert_eq!(Selection::All.visible_pairs(5), 15.0);
    }

    #[test]
    fn window_and_document_meet_in_one_number() {
        let mut first = vec![0, 0, 0, 0, 4, 4, 4, 4, 4];
        Selection::Window(3).narrow(0, &mut first);
        assert_eq!(first, [0, 0, 0, 1, 4, 4, 4, 5, 6]);
        assert_eq!(visible_pages(first[6], 9, 2), 2..5);
        assert_eq!(visible_pages(first[3], 4, 2), 0..2);
    }
}
