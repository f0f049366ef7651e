//! From documents to sequences with labels: tokenizers, prepared token shards, windows over them and their order. It must
//! not know models or the schedule.

mod bytes;
pub mod chat;
mod dataset;
mod error;
mod index;
mod input;
mod order;
mod pieces;
mod prepare;
mod preview;
mod reading;
mod rows;
mod shards;
mod source;
mod sources;
mod tokenizer;
mod windows;

pub use dataset::Dataset;
pub use error::{Error, Result};
pub use index::{Index, Mask, Recipe, Shard, SourceFile, is_prepared};
pub use order::{Cursor, Order, Place, Share, SourceCursor};
pub use prepare::{Advance, Existing, LeftOut, PrepareRequest, Prepared, prepare};
pub use preview::{Preview, preview};
pub use reading::Reading;
pub use source::{Source, open_source};
pub use sources::Sources;
pub use tokenizer::{Tokenizer, TokenizerIdentity};
pub use windows::{Cutting, Fates, Windows};

use oomb_device::ops::loss::IGNORE;

/// One training example of S tokens, in the form the schedule reads: four arrays of S numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids, each below the vocabulary size.
    pub ids: Vec<u32>,
    /// The token that follows, shifted once over the whole sequence; [`oomb_device::ops::loss::IGNORE`] where nothing is
    /// to be learnt: at the last token of a document or of the sequence.
    pub labels: Vec<u32>,
    /// Position for RoPE, from 0 within each document.
    pub positions: Vec<u32>,
    /// First visible position of each token, as an index into this sequence: the document's first token. A window moves
    /// it later.
    pub first: Vec<u32>,
}

impl Sequence {
    /// Packs documents: `ids` are their tokens one after the other, `starts` the indices at which one begins, ascending.
    /// A document that began before this sequence starts anew at index 0.
    ///
    /// # Panics
    /// If a start is not below `ids.len()`, or the sequence is longer than u32 counts.
    pub fn packed(ids: Vec<u32>, starts: &[usize]) -> Self {
        let num_tokens = u32::try_from(ids.len()).expect("a sequence has fewer than 2^32 tokens");
        let mut first = vec![0; ids.len()];
        for (index, &start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(ids.len());
            first[start..end].fill(start as u32);
        }
        let positions = (0..num_tokens).zip(&first).map(|(t, &start)| t - start).collect();
        let mut labels: Vec<u32> = ids.iter().skip(1).copied().chain([IGNORE]).collect();
        labels.truncate(ids.len());
        for &start in starts.iter().filter(|&&start| start > 0) {
            labels[start - 1] = IGNORE;
        }
        Self { ids, labels, positions, first }
    }

    /// Takes the labels away that are tokens not to be trained: `trained` has a flag per token.
    ///
    /// # Panics
    /// If it has another number of flags.
    #[must_use]
    pub fn masked(mut self, trained: &[bool]) -> Self {
        assert_eq!(trained.len(), self.ids.len(), "a flag per token");
        for (label, _) in self.labels.iter_mut().zip(&trained[1.min(trained.len())..]).filter(|(_, trained)| !**trained) {
            *label = IGNORE;
        }
        self
    }

    /// Adds the tokens of another sequence, which see none of these.
    ///
    /// # Panics
    /// If both are longer together than u32 counts.
    pub fn append(&mut self, other: &Self) {
        let start = u32::try_from(self.ids.len()).expect("a sequence has fewer than 2^32 tokens");
        self.ids.extend(&other.ids);
        self.labels.extend(&other.labels);
        self.positions.extend(&other.positions);
        self.first.extend(other.first.iter().map(|first| start.checked_add(*first).expect("fewer than 2^32 tokens")));
    }

    /// Its largest position plus one: tokens of its longest document.
    pub fn longest(&self) -> usize {
        self.positions.iter().max().map_or(0, |&last| last as usize + 1)
    }

    /// Number of labels that count in the loss.
    pub fn num_labels(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORE).count()
    }
}
