//! From documents to sequences with labels. It must not know models or the schedule.

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
