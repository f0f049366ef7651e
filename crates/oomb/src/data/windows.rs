//! Documents cut and packed into sequences. It must not know in which order they are visited.

use super::Sequence;
use super::dataset::Dataset;
use super::error::{Error, Result};
use crate::config::{LongDocuments, Packing};
use std::collections::BTreeMap;
use std::ops::Range;

/// How documents become sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cutting {
    /// S: tokens of a sequence at most.
    pub sequence_tokens: usize,
    /// What shares a sequence.
    pub packing: Packing,
    /// What becomes of documents longer than S, where documents are kept whole.
    pub long_documents: LongDocuments,
}

/// What became of the documents, by their index in the dataset. With [`Packing::Concat`] all are used, in windows that end
/// where they end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fates {
    /// Documents that are used, whole or in part.
    pub num_used: usize,
    /// Those of which only the start is used.
    pub truncated: Vec<usize>,
    /// Those left out because they are longer than a sequence.
    pub too_long: Vec<usize>,
    /// Those left out because nothing in the part that fits is trained.
    pub without_labels: Vec<usize>,
}

/// A dataset cut into sequences of at most S tokens, each with something to learn. Documents that share one follow each
/// other without seeing each other; nothing is padded.
#[derive(Debug)]
pub struct Windows {
    dataset: Dataset,
    /// Runs of tokens, those of one window after those of another.
    pieces: Vec<Range<u64>>,
    /// First piece of each window, and the end of the last.
    firsts: Vec<usize>,
    fates: Fates,
}

impl Windows {
    /// Cuts `dataset` into consecutive windows of `sequence_tokens` over the documents one after the other; the last is what
    /// is left. Windows without a label are left out.
    ///
    /// # Errors
    /// If the data is shorter than one sequence, or has no label at all.
    pub fn new(dataset: Dataset, sequence_tokens: usize) -> Result<Self> {
        Self::cut(dataset, Cutting { sequence_tokens, packing: Packing::Concat, long_documents: LongDocuments::Auto })
    }

    /// Cuts `dataset` as `cutting` says.
    ///
    /// # Errors
    /// If nothing is left: every document too long, or without a label; or, for windows over all documents, if the data is
    /// shorter than one sequence.
    pub fn cut(dataset: Dataset, cutting: Cutting) -> Result<Self> {
        let sequence_tokens = cutting.sequence_tokens as u64;
        let mut cutter = Cutter { dataset: &dataset, sequence_tokens, pieces: Vec::new(), fates: Fates::default() };
        let packing = resolve(cutting, &dataset);
        match packing {
            Packing::Concat => cutter.windows()?,
            _ => cutter.documents(cutting.long_documents)?,
        }
        let Cutter { pieces, fates, .. } = cutter;
        if pieces.is_empty() {
            return Err(nothing_left(&dataset, sequence_tokens, &fates));
        }
        let windows: Vec<Vec<Range<u64>>> = match packing {
            Packing::Documents => best_fit(pieces, sequence_tokens),
            _ => pieces.into_iter().map(|piece| vec![piece]).collect(),
        };
        let mut firsts = vec![0];
        let mut pieces = Vec::new();
        for window in windows {
            pieces.extend(window);
            firsts.push(pieces.len());
        }
        Ok(Self { dataset, pieces, firsts, fates })
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.firsts.len() - 1
    }

    /// Never: there is at least one window.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The data they are cut from.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// What became of the documents.
    pub fn fates(&self) -> &Fates {
        &self.fates
    }

    /// The window's runs of tokens, counted over the whole dataset.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn pieces(&self, index: usize) -> &[Range<u64>] {
        &self.pieces[self.firsts[index]..self.firsts[index + 1]]
    }

    /// The window's length in tokens.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn num_tokens(&self, index: usize) -> u64 {
        self.pieces(index).iter().map(|piece| piece.end - piece.start).sum()
    }

    /// Reads a window.
    ///
    /// # Errors
    /// If its shards cannot be read.
    ///
    /// # Panics
    /// If there is no such window.
    pub fn get(&self, index: usize) -> Result<Sequence> {
        let (mut ids, mut starts, mut trained) = (Vec::new(), Vec::new(), Vec::new());
        for piece in self.pieces(index) {
            starts.extend(self.dataset.document_starts(piece).iter().map(|start| ids.len() + start));
            ids.extend(self.dataset.tokens(piece.clone())?);
            trained.extend(self.dataset.trained(piece.clone())?);
        }
        Ok(Sequence::packed(ids, &starts).masked(&trained))
    }
}

/// What `auto` means for this data.
fn resolve(cutting: Cutting, dataset: &Dataset) -> Packing {
    match cutting.packing {
        Packing::Auto if dataset.is_masked() || cutting.long_documents != LongDocuments::Auto => Packing::Documents,
        Packing::Auto => Packing::Concat,
        given => given,
    }
}

fn nothing_left(dataset: &Dataset, sequence_tokens: u64, fates: &Fates) -> Error {
    let path = dataset.folder().to_path_buf();
    if !fates.too_long.is_empty() {
        return Error::NothingFits { path, sequence_tokens };
    }
    let hint = if dataset.is_masked() {
        " to train within data.sequence_tokens: lengthen the sequence"
    } else {
        " to predict: each is a single token"
    };
    Error::Empty { what: format!("every document of {}", path.display()), hint }
}

/// Cutting under way.
struct Cutter<'a> {
    dataset: &'a Dataset,
    sequence_tokens: u64,
    pieces: Vec<Range<u64>>,
    fates: Fates,
}

impl Cutter<'_> {
    /// Consecutive windows over everything.
    fn windows(&mut self) -> Result<()> {
        let (wanted, num_tokens) = (self.sequence_tokens, self.dataset.num_tokens());
        if wanted > num_tokens {
            let path = self.dataset.folder().to_path_buf();
            return Err(Error::SequenceTooLong { sequence_tokens: wanted, num_tokens, path });
        }
        self.fates.num_used = self.dataset.num_documents();
        self.cut_up(0..num_tokens)?;
        Ok(())
    }

    /// Each document by itself.
    fn documents(&mut self, long: LongDocuments) -> Result<()> {
        let long = match long {
            LongDocuments::Auto if self.dataset.is_masked() => LongDocuments::Truncate,
            LongDocuments::Auto => LongDocuments::Cut,
            given => given,
        };
        for index in 0..self.dataset.num_documents() {
            let mut document = self.dataset.document(index);
            let is_long = document.end - document.start > self.sequence_tokens;
            if is_long && long == LongDocuments::Skip {
                self.fates.too_long.push(index);
                continue;
            }
            let before = self.pieces.len();
            if long != LongDocuments::Cut {
                document.end = document.end.min(document.start + self.sequence_tokens);
            }
            self.cut_up(document)?;
            if self.pieces.len() == before {
                self.fates.without_labels.push(index);
                continue;
            }
            self.fates.num_used += 1;
            if is_long && long == LongDocuments::Truncate {
                self.fates.truncated.push(index);
            }
        }
        Ok(())
    }

    /// Runs of S tokens and what is left, those with a label.
    fn cut_up(&mut self, range: Range<u64>) -> Result<()> {
        let mut start = range.start;
        while start < range.end {
            let piece = start..(start + self.sequence_tokens).min(range.end);
            start = piece.end;
            if self.has_label(&piece)? {
                self.pieces.push(piece);
            }
        }
        Ok(())
    }

    /// Whether some document has, within the piece, a trained token that is not its first there.
    fn has_label(&self, piece: &Range<u64>) -> Result<bool> {
        let (starts, num_tokens) = (self.dataset.document_starts(piece), (piece.end - piece.start) as usize);
        let trained = if self.dataset.is_masked() { Some(self.dataset.trained(piece.clone())?) } else { None };
        let within = |(index, &start): (usize, &usize)| {
            let end = starts.get(index + 1).copied().unwrap_or(num_tokens);
            match &trained {
                Some(trained) => trained[start + 1..end.max(start + 1)].contains(&true),
                None => end - start >= 2,
            }
        };
        Ok(starts.iter().enumerate().any(within))
    }
}

/// Packs pieces into windows of at most `capacity` tokens: the longest first, each into the window that it fills best
/// (Johnson 1973: at most 11/9 of the fewest windows, and 6/9 more). In a window they keep the order of the data.
fn best_fit(mut pieces: Vec<Range<u64>>, capacity: u64) -> Vec<Vec<Range<u64>>> {
    let length = |piece: &Range<u64>| piece.end - piece.start;
    pieces.sort_by_key(|piece| (std::cmp::Reverse(length(piece)), piece.start));
    let mut windows: Vec<Vec<Range<u64>>> = Vec::new();
    // Windows by the room that they have left.
    let mut with_room: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for piece in pieces {
        let wanted = length(&piece);
        let best = with_room.range(wanted..).next().map(|(&room, _)| room);
        let (window, room) = match best {
            Some(room) => {
                let same = with_room.get_mut(&room).expect("just found");
                let window = same.pop().expect("rooms without windows are removed");
                if same.is_empty() {
                    with_room.remove(&room);
                }
                (window, room)
            }
            None => {
                windows.push(Vec::new());
                (windows.len() - 1, capacity)
            }
        };
        windows[window].push(piece);
        if room > wanted {
            with_room.entry(room - wanted).or_default().push(window);
        }
    }
    for window in &mut windows {
        window.sort_by_key(|piece| piece.start);
    }
    windows.sort_by_key(|window| window[0].start);
    windows
}
