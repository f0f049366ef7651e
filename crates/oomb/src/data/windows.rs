//! Sequences as windows over the concatenated documents. It must not know in which order they are visited.

use super::Sequence;
use super::dataset::Dataset;
use super::error::{Error, Result};
use std::ops::Range;

/// A dataset cut into windows of S tokens; the last is what is left, if it is at least 2 tokens. Documents are packed:
/// they follow each other within a window without seeing each other.
#[derive(Debug)]
pub struct Windows {
    dataset: Dataset,
    sequence_tokens: u64,
    /// First token of each window that has a label.
    starts: Vec<u64>,
}

impl Windows {
    /// Cuts `dataset` into windows of `sequence_tokens`. Windows without a label (every document in them is one token) are
    /// left out.
    ///
    /// # Errors
    /// If the data is shorter than one sequence, or has no label at all.
    pub fn new(dataset: Dataset, sequence_tokens: usize) -> Result<Self> {
        let (wanted, num_tokens) = (sequence_tokens as u64, dataset.num_tokens());
        if wanted > num_tokens {
            let path = dataset.folder().to_path_buf();
            return Err(Error::SequenceTooLong { sequence_tokens: wanted, num_tokens, path });
        }
        let mut windows = Self { dataset, sequence_tokens: wanted, starts: Vec::new() };
        let all = (0..num_tokens).step_by(sequence_tokens);
        windows.starts = all.filter(|&start| windows.has_label(start)).collect();
        if windows.starts.is_empty() {
            let what = format!("every document of {}", windows.dataset.folder().display());
            return Err(Error::Empty { what, hint: " to predict: each is a single token" });
        }
        Ok(windows)
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Never: there is at least one window.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The data they are cut from.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// The window's tokens, counted over the whole dataset.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn range(&self, index: usize) -> Range<u64> {
        self.range_from(self.starts[index])
    }

    /// Reads a window.
    ///
    /// # Errors
    /// If its shards cannot be read.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn get(&self, index: usize) -> Result<Sequence> {
        let range = self.range(index);
        let starts = self.dataset.document_starts(&range);
        Ok(Sequence::packed(self.dataset.tokens(range)?, &starts))
    }

    fn range_from(&self, start: u64) -> Range<u64> {
        start..(start + self.sequence_tokens).min(self.dataset.num_tokens())
    }

    /// Whether some document has two tokens in the window.
    fn has_label(&self, start: u64) -> bool {
        let range = self.range_from(start);
        let (starts, num_tokens) = (self.dataset.document_starts(&range), (range.end - range.start) as usize);
        starts.iter().enumerate().any(|(i, start)| starts.get(i + 1).unwrap_or(&num_tokens) - start >= 2)
    }
}
