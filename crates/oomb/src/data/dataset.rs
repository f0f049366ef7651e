//! A prepared folder, opened and checked: its tokens, masks and documents. It must not know text, nor how sequences are cut.

use super::error::{Error, Result};
use super::index::{Entry, INDEX_FILE, Index, Shard, read_index};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An opened folder, checked.
#[derive(Debug)]
pub struct Dataset {
    folder: PathBuf,
    index: Index,
    /// First token of each document, counted over all shards, and the end of the last.
    starts: Vec<u64>,
    /// File and row of each document.
    places: Vec<(u32, u32)>,
}

impl Dataset {
    /// Opens a folder made by [`super::prepare`] and checks all of it: index, lengths, checksums, ids. Reads every shard
    /// once. In memory stay 16 bytes per document.
    ///
    /// # Errors
    /// Whatever is missing, truncated or altered, with wanted and got.
    pub fn open(folder: &Path) -> Result<Self> {
        let (index, documents) = read_index(folder)?;
        let dataset = Self::new(folder, index, &documents)?;
        dataset.check_files()?;
        let mut largest = None;
        for shard in &dataset.index.shards {
            largest = largest.max(check_shard(folder, shard)?);
        }
        if largest != Some(dataset.index.largest_id) {
            let detail = format!("largest_id = {}, but the largest in the shards is {largest:?}", dataset.index.largest_id);
            return Err(dataset.damaged(detail));
        }
        if dataset.index.largest_id as usize >= dataset.index.vocab_size {
            let (path, id) = (dataset.folder, dataset.index.largest_id);
            return Err(Error::OutsideVocabulary { path, id, vocab_size: dataset.index.vocab_size });
        }
        Ok(dataset)
    }

    fn new(folder: &Path, index: Index, documents: &[Entry]) -> Result<Self> {
        let mut starts = Vec::with_capacity(documents.len() + 1);
        let mut next = 0_u64;
        for document in documents {
            starts.push(next);
            next = next.saturating_add(document.num_tokens);
        }
        starts.push(next);
        let places = documents.iter().map(|document| (document.file, document.row)).collect();
        let dataset = Self { folder: folder.to_path_buf(), index, starts, places };
        let wanted = dataset.index.num_tokens;
        let in_shards = dataset.index.shards.iter().fold(0_u64, |sum, shard| sum.saturating_add(shard.num_tokens));
        if in_shards != wanted || next != wanted {
            return Err(dataset.damaged(format!("{wanted} tokens in all, but shards have {in_shards} and documents {next}")));
        }
        let num_masks = dataset.index.shards.iter().filter(|shard| shard.mask.is_some()).count();
        if num_masks != 0 && num_masks != dataset.index.shards.len() {
            return Err(dataset.damaged(format!("{num_masks} of {} shards have a mask", dataset.index.shards.len())));
        }
        if wanted == 0 {
            return Err(Error::Empty { what: folder.display().to_string(), hint: ": prepare it from other text" });
        }
        Ok(dataset)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// All tokens there are.
    pub fn num_tokens(&self) -> u64 {
        self.index.num_tokens
    }

    /// CRC-32 of all tokens, of their masks and of where documents begin: the same data gives the same, wherever it lies.
    pub fn fingerprint(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for shard in &self.index.shards {
            crc.update(&shard.crc32.to_le_bytes());
            crc.update(&shard.mask.as_ref().map_or(0, |mask| mask.crc32).to_le_bytes());
        }
        for document in self.starts.windows(2) {
            crc.update(&(document[1] - document[0]).to_le_bytes());
        }
        crc.finalize()
    }

    /// All documents there are.
    pub fn num_documents(&self) -> usize {
        self.places.len()
    }

    /// The tokens of a document, counted over all shards.
    ///
    /// # Panics
    /// If there is no such document.
    pub fn document(&self, index: usize) -> Range<u64> {
        self.starts[index]..self.starts[index + 1]
    }

    /// Where a document came from: "talks.jsonl row 17", or the file alone where the file is the document.
    ///
    /// # Panics
    /// If there is no such document.
    pub fn document_name(&self, index: usize) -> String {
        let (file, row) = self.places[index];
        let name = &self.index.files[file as usize].name;
        if row == 0 { name.clone() } else { format!("{name} row {row}") }
    }

    /// Whether only some tokens are trained.
    pub fn is_masked(&self) -> bool {
        self.index.shards.iter().any(|shard| shard.mask.is_some())
    }

    /// The `tokenizer.json` that made the tokens, where there is one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        let path = self.folder.join("tokenizer.json");
        path.is_file().then_some(path)
    }

    /// Refuses data with an id that a model of `vocab_size` tokens does not have.
    ///
    /// # Errors
    /// Names the id and the vocabulary.
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<()> {
        let (path, id) = (self.folder.clone(), self.index.largest_id);
        if id as usize >= vocab_size { Err(Error::OutsideVocabulary { path, id, vocab_size }) } else { Ok(()) }
    }

    /// Reads tokens `range`, counted over all shards.
    ///
    /// # Errors
    /// If a shard cannot be read, or has become shorter since it was opened.
    ///
    /// # Panics
    /// If the range leaves the data.
    pub fn tokens(&self, range: Range<u64>) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity((range.end - range.start) as usize);
        self.read(range, 4, |shard| Some(&shard.file), |bytes| ids.extend(ids_of(bytes)))?;
        Ok(ids)
    }

    /// Which of the tokens `range` are trained to be predicted; all of them where there is no mask.
    ///
    /// # Errors
    /// As [`Self::tokens`].
    ///
    /// # Panics
    /// If the range leaves the data.
    pub fn trained(&self, range: Range<u64>) -> Result<Vec<bool>> {
        let mut trained = Vec::with_capacity((range.end - range.start) as usize);
        if !self.is_masked() {
            trained.resize((range.end - range.start) as usize, true);
            return Ok(trained);
        }
        self.read(
            range,
            1,
            |shard| shard.mask.as_ref().map(|mask| &mask.file),
            |bytes| {
                trained.extend(bytes.iter().map(|&byte| byte != 0));
            },
        )?;
        Ok(trained)
    }

    /// Reads `range` of files that have `width` bytes per token.
    fn read<'a>(
        &'a self,
        range: Range<u64>,
        width: u64,
        file_of: impl Fn(&'a Shard) -> Option<&'a String>,
        mut sink: impl FnMut(&[u8]),
    ) -> Result<()> {
        assert!(range.start <= range.end && range.end <= self.num_tokens(), "tokens {range:?} of {}", self.num_tokens());
        let mut shard_start = 0;
        for shard in &self.index.shards {
            let from = range.start.max(shard_start) - shard_start;
            let to = range.end.min(shard_start + shard.num_tokens).saturating_sub(shard_start);
            if from < to {
                let path = self.folder.join(file_of(shard).expect("only files that every shard has are read"));
                let mut file = File::open(&path).map_err(Error::io("read", &path))?;
                file.seek(SeekFrom::Start(from * width)).map_err(Error::io("read", &path))?;
                let mut bytes = vec![0; ((to - from) * width) as usize];
                file.read_exact(&mut bytes).map_err(Error::io("read", &path))?;
                sink(&bytes);
            }
            shard_start += shard.num_tokens;
        }
        Ok(())
    }

    /// Where documents start within `range`, as indices into it; index 0 is always one.
    pub fn document_starts(&self, range: &Range<u64>) -> Vec<usize> {
        let starts = &self.starts[..self.places.len()];
        let next = starts.partition_point(|&start| start <= range.start);
        let inside = starts[next..].iter().take_while(|&&start| start < range.end);
        std::iter::once(0).chain(inside.map(|start| (start - range.start) as usize)).collect()
    }

    /// A shard is a file of the folder: an index from elsewhere must not lead out of it.
    fn check_files(&self) -> Result<()> {
        let outside = |shard: &&Shard| Path::new(&shard.file).file_name().is_none_or(|name| name != shard.file.as_str());
        match self.index.shards.iter().find(outside) {
            Some(shard) => Err(self.damaged(format!("shard {:?} is not a file name", shard.file))),
            None => Ok(()),
        }
    }

    fn damaged(&self, detail: String) -> Error {
        Error::Damaged { path: self.folder.join(INDEX_FILE), detail }
    }
}

/// Reads a shard and its mask once and compares lengths and checksums; returns the largest id.
fn check_shard(folder: &Path, shard: &Shard) -> Result<Option<u32>> {
    let mut largest = None;
    check_file(&folder.join(&shard.file), shard.num_tokens.checked_mul(4), shard.crc32, |part| {
        largest = largest.max(ids_of(part).max());
    })?;
    if let Some(mask) = &shard.mask {
        check_file(&folder.join(&mask.file), Some(shard.num_tokens), mask.crc32, |_| {})?;
    }
    Ok(largest)
}

fn check_file(path: &Path, wanted: Option<u64>, crc32: u32, mut look: impl FnMut(&[u8])) -> Result<()> {
    let damaged = |detail: String| Error::Damaged { path: path.to_path_buf(), detail };
    let file = File::open(path).map_err(Error::io("read", path))?;
    let num_bytes = file.metadata().map_err(Error::io("read", path))?.len();
    let wanted = wanted.ok_or_else(|| damaged("its length is not possible".to_owned()))?;
    if num_bytes != wanted {
        return Err(damaged(format!("wanted {wanted} bytes, got {num_bytes}")));
    }
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut crc, mut left) = (crc32fast::Hasher::new(), wanted);
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let part = &mut buffer[..left.min(1 << 20) as usize];
        reader.read_exact(part).map_err(Error::io("read", path))?;
        crc.update(part);
        look(part);
        left -= part.len() as u64;
    }
    let got = crc.finalize();
    if got == crc32 { Ok(()) } else { Err(damaged(format!("wanted CRC {crc32:08x}, got {got:08x}"))) }
}

fn ids_of(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word))
}
