//! Prepared token shards as they lie on disk: `index.json` and `tokens-NNNNN.bin` (little-endian u32). It must not know
//! text, nor how sequences are cut.

use super::error::{Error, Result};
use super::tokenizer::TokenizerIdentity;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Version of the format that this program writes and reads.
pub(super) const VERSION: u32 = 1;
/// Name of the index.
pub(super) const INDEX_FILE: &str = "index.json";
/// Tells our index from another `index.json`.
pub(super) const FORMAT: &str = "oomb-tokens";

/// `index.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Always `oomb-tokens`.
    pub format: String,
    /// Of the format.
    pub version: u32,
    /// What made the tokens.
    pub tokenizer: TokenizerIdentity,
    /// One more than the largest id of the tokenizer.
    pub vocab_size: usize,
    /// All tokens.
    pub num_tokens: u64,
    /// The largest id that occurs.
    pub largest_id: u32,
    /// The files, in order.
    pub shards: Vec<Shard>,
    /// The documents, in order.
    pub documents: Vec<Document>,
}

/// A run of tokens in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// Name within the folder.
    pub file: String,
    /// Tokens in it.
    pub num_tokens: u64,
    /// CRC-32 of the file.
    pub crc32: u32,
}

/// One document: one input file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// The file as it was named.
    pub name: String,
    /// Its first token, counted over all shards.
    pub first_token: u64,
    /// Its length in tokens.
    pub num_tokens: u64,
    /// Its length in bytes of text.
    pub source_bytes: u64,
    /// CRC-32 of its text.
    pub source_crc32: u32,
}

/// An opened folder, checked.
#[derive(Debug)]
pub struct Dataset {
    folder: PathBuf,
    index: Index,
}

impl Dataset {
    /// Opens a folder made by [`super::prepare`] and checks all of it: index, lengths, checksums, ids. Reads every shard
    /// once.
    ///
    /// # Errors
    /// Whatever is missing, truncated or altered, with wanted and got.
    pub fn open(folder: &Path) -> Result<Self> {
        let index = read_index(folder)?;
        let dataset = Self { folder: folder.to_path_buf(), index };
        dataset.check_documents()?;
        dataset.check_files()?;
        let mut largest = None;
        for shard in &dataset.index.shards {
            largest = largest.max(check_shard(&folder.join(&shard.file), shard)?);
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
        assert!(range.start <= range.end && range.end <= self.num_tokens(), "tokens {range:?} of {}", self.num_tokens());
        let mut ids = Vec::with_capacity((range.end - range.start) as usize);
        let mut shard_start = 0;
        for shard in &self.index.shards {
            let from = range.start.max(shard_start) - shard_start;
            let to = range.end.min(shard_start + shard.num_tokens).saturating_sub(shard_start);
            if from < to {
                let path = self.folder.join(&shard.file);
                let mut file = File::open(&path).map_err(Error::io("read", &path))?;
                file.seek(SeekFrom::Start(from * 4)).map_err(Error::io("read", &path))?;
                let mut bytes = vec![0; ((to - from) * 4) as usize];
                file.read_exact(&mut bytes).map_err(Error::io("read", &path))?;
                ids.extend(ids_of(&bytes));
            }
            shard_start += shard.num_tokens;
        }
        Ok(ids)
    }

    /// Where documents start within `range`, as indices into it; index 0 is always one.
    pub fn document_starts(&self, range: &Range<u64>) -> Vec<usize> {
        let documents = &self.index.documents;
        let next = documents.partition_point(|document| document.first_token <= range.start);
        let inside = documents[next..].iter().map(|document| document.first_token).take_while(|&start| start < range.end);
        std::iter::once(0).chain(inside.map(|start| (start - range.start) as usize)).collect()
    }

    fn check_documents(&self) -> Result<()> {
        let index = &self.index;
        let sum = index.shards.iter().try_fold(0u64, |sum, shard| sum.checked_add(shard.num_tokens));
        let in_shards = sum.ok_or_else(|| self.damaged("its shards have more tokens than can be".to_owned()))?;
        let mut next = 0u64;
        for document in &index.documents {
            if document.first_token != next || document.num_tokens == 0 {
                let (name, first) = (&document.name, document.first_token);
                let detail = format!("document {name} should start at token {next} and have tokens, it starts at {first}");
                return Err(self.damaged(detail));
            }
            let end = next.checked_add(document.num_tokens);
            next = end.ok_or_else(|| self.damaged(format!("document {} is longer than can be", document.name)))?;
        }
        if in_shards != index.num_tokens || next != index.num_tokens {
            let wanted = index.num_tokens;
            return Err(self.damaged(format!("{wanted} tokens in all, but shards have {in_shards} and documents {next}")));
        }
        if index.num_tokens == 0 {
            return Err(Error::Empty { what: self.folder.display().to_string(), hint: ": prepare it from other text" });
        }
        Ok(())
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

/// Reads an index and checks that it is one, of this version.
pub(super) fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX_FILE);
    let content = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let damaged = |detail: String| Error::Damaged { path: path.clone(), detail };
    let value: serde_json::Value = serde_json::from_slice(&content).map_err(|e| damaged(format!("not JSON: {e}")))?;
    if value.get("format").and_then(serde_json::Value::as_str) != Some(FORMAT) {
        return Err(damaged(format!("its \"format\" is not \"{FORMAT}\"")));
    }
    let version = value.get("version").and_then(serde_json::Value::as_u64);
    if version != Some(u64::from(VERSION)) {
        let got = version.and_then(|version| u32::try_from(version).ok()).unwrap_or(0);
        return Err(Error::Version { path, got, wanted: VERSION });
    }
    serde_json::from_value(value).map_err(|e| damaged(e.to_string()))
}

/// Whether a folder holds an index of ours, of any version.
pub fn is_prepared(folder: &Path) -> bool {
    let content = std::fs::read(folder.join(INDEX_FILE)).ok();
    let value = content.and_then(|content| serde_json::from_slice::<serde_json::Value>(&content).ok());
    value.is_some_and(|value| value.get("format").and_then(serde_json::Value::as_str) == Some(FORMAT))
}

/// Reads a shard once and compares length and checksum; returns the largest id.
fn check_shard(path: &Path, shard: &Shard) -> Result<Option<u32>> {
    let damaged = |detail: String| Error::Damaged { path: path.to_path_buf(), detail };
    let file = File::open(path).map_err(Error::io("read", path))?;
    let num_bytes = file.metadata().map_err(Error::io("read", path))?.len();
    let wanted = shard.num_tokens.checked_mul(4).ok_or_else(|| damaged("its length is not possible".to_owned()))?;
    if num_bytes != wanted {
        return Err(damaged(format!("wanted {wanted} bytes, got {num_bytes}")));
    }
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut crc, mut largest, mut left) = (crc32fast::Hasher::new(), None, wanted);
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let part = &mut buffer[..left.min(1 << 20) as usize];
        reader.read_exact(part).map_err(Error::io("read", path))?;
        crc.update(part);
        largest = largest.max(ids_of(part).max());
        left -= part.len() as u64;
    }
    let got = crc.finalize();
    if got != shard.crc32 {
        return Err(damaged(format!("wanted CRC {:08x}, got {got:08x}", shard.crc32)));
    }
    Ok(largest)
}

fn ids_of(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word))
}
