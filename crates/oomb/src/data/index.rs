//! Prepared data as it lies on disk: `index.json`, `documents.bin`, `tokens-NNNNN.bin` and, where only some tokens are
//! trained, `mask-NNNNN.bin`. It must not know text, nor how sequences are cut.
//!
//! All numbers are little-endian. Tokens are u32. A mask has a byte per token: 1 where the token is trained to be predicted,
//! 0 where it is only read. A document is 16 bytes: its tokens (u64), its file (u32), its row in it from 1, or 0 where the
//! whole file is the document (u32). Version 1 had the documents, one per file, in `index.json`, and no masks; it is read.

use super::error::{Error, Result};
use super::tokenizer::TokenizerIdentity;
use crate::config::{DataFormat, LossOn, Malformed};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the format that this program writes; it reads this and all before.
pub(super) const VERSION: u32 = 2;
/// Name of the index.
pub(super) const INDEX_FILE: &str = "index.json";
/// Name of the list of documents.
pub(super) const DOCUMENTS_FILE: &str = "documents.bin";
/// Name of the list of rows that were left out: JSON lines of file, row and reason.
pub(super) const LEFT_OUT_FILE: &str = "left_out.jsonl";
/// Tells our index from another `index.json`.
pub(super) const FORMAT: &str = "oomb-tokens";
/// Bytes of one document in [`DOCUMENTS_FILE`].
const DOCUMENT_BYTES: usize = 16;

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
    /// How rows became documents.
    pub recipe: Recipe,
    /// One more than the largest id of the tokenizer.
    pub vocab_size: usize,
    /// All tokens.
    pub num_tokens: u64,
    /// Tokens that are trained to be predicted.
    pub num_trained: u64,
    /// The largest id that occurs.
    pub largest_id: u32,
    /// All documents.
    pub num_documents: u64,
    /// CRC-32 of the list of documents.
    pub documents_crc32: u32,
    /// The files of tokens, in order.
    pub shards: Vec<Shard>,
    /// The files of text, in order.
    pub files: Vec<SourceFile>,
}

/// How rows became documents: enough to tell whether two preparations make the same.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Text or conversations.
    pub format: DataFormat,
    /// The field that was read.
    pub field: String,
    /// What happens to rows that cannot be used.
    pub malformed: Malformed,
    /// Which tokens are trained.
    pub loss_on: LossOn,
    /// CRC-32 of the chat template and its special tokens.
    pub chat_template_crc32: Option<u32>,
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
    /// The mask beside it, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<Mask>,
}

/// The mask of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mask {
    /// Name within the folder.
    pub file: String,
    /// CRC-32 of the file.
    pub crc32: u32,
}

/// A file of text and what became of its rows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// As it was named.
    pub name: String,
    /// Its length in bytes, as it lies there.
    pub source_bytes: u64,
    /// CRC-32 of it.
    pub source_crc32: u32,
    /// Rows that became documents; 1 for a text file.
    pub num_documents: u64,
    /// Rows with nothing to learn: empty, or without a trained token.
    pub num_empty: u64,
    /// Rows that could not be used.
    pub num_malformed: u64,
}

/// A document in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its length.
    pub(super) num_tokens: u64,
    /// Index of its file.
    pub(super) file: u32,
    /// Row in the file, from 1; 0 where the file is the document.
    pub(super) row: u32,
}

impl Entry {
    /// As it lies on disk.
    pub(super) fn to_bytes(self) -> [u8; DOCUMENT_BYTES] {
        let mut bytes = [0; DOCUMENT_BYTES];
        bytes[..8].copy_from_slice(&self.num_tokens.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.file.to_le_bytes());
        bytes[12..].copy_from_slice(&self.row.to_le_bytes());
        bytes
    }

    fn of_bytes(bytes: &[u8; DOCUMENT_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { num_tokens: u64::from(word(0)) | u64::from(word(4)) << 32, file: word(8), row: word(12) }
    }
}

/// Version 1 of `index.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexV1 {
    format: String,
    version: u32,
    tokenizer: TokenizerIdentity,
    vocab_size: usize,
    num_tokens: u64,
    largest_id: u32,
    shards: Vec<Shard>,
    documents: Vec<DocumentV1>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DocumentV1 {
    name: String,
    first_token: u64,
    num_tokens: u64,
    source_bytes: u64,
    source_crc32: u32,
}

/// Reads the index of a folder and its list of documents, of any version so far.
pub(super) fn read_index(folder: &Path) -> Result<(Index, Vec<Entry>)> {
    let path = folder.join(INDEX_FILE);
    let content = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let damaged = |detail: String| Error::Damaged { path: path.clone(), detail };
    let value: serde_json::Value = serde_json::from_slice(&content).map_err(|e| damaged(format!("not JSON: {e}")))?;
    if value.get("format").and_then(serde_json::Value::as_str) != Some(FORMAT) {
        return Err(damaged(format!("its \"format\" is not \"{FORMAT}\"")));
    }
    let version = value.get("version").and_then(serde_json::Value::as_u64);
    match version {
        Some(1) => of_v1(serde_json::from_value(value).map_err(|e| damaged(e.to_string()))?).map_err(damaged),
        Some(2) => {
            let index: Index = serde_json::from_value(value).map_err(|e| damaged(e.to_string()))?;
            let documents = read_documents(folder, &index)?;
            Ok((index, documents))
        }
        _ => {
            let got = version.and_then(|version| u32::try_from(version).ok()).unwrap_or(0);
            Err(Error::Version { path, got, wanted: VERSION })
        }
    }
}

fn read_documents(folder: &Path, index: &Index) -> Result<Vec<Entry>> {
    let path = folder.join(DOCUMENTS_FILE);
    let content = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let damaged = |detail: String| Err(Error::Damaged { path: path.clone(), detail });
    let (entries, rest) = content.as_chunks::<DOCUMENT_BYTES>();
    if !rest.is_empty() || entries.len() as u64 != index.num_documents {
        let wanted = index.num_documents.saturating_mul(DOCUMENT_BYTES as u64);
        return damaged(format!("wanted {wanted} bytes, got {}", content.len()));
    }
    let (wanted, got) = (index.documents_crc32, crc32fast::hash(&content));
    if wanted != got {
        return damaged(format!("wanted CRC {wanted:08x}, got {got:08x}"));
    }
    let entries: Vec<Entry> = entries.iter().map(Entry::of_bytes).collect();
    match entries.iter().position(|entry| entry.file as usize >= index.files.len() || entry.num_tokens == 0) {
        Some(at) => damaged(format!("document {at} should be of one of {} files and have tokens", index.files.len())),
        None => Ok(entries),
    }
}

fn of_v1(old: IndexV1) -> std::result::Result<(Index, Vec<Entry>), String> {
    let (mut entries, mut files, mut next) = (Vec::new(), Vec::new(), 0_u64);
    for document in old.documents {
        if document.first_token != next || document.num_tokens == 0 {
            let (name, first) = (&document.name, document.first_token);
            return Err(format!("document {name} should start at token {next} and have tokens, it starts at {first}"));
        }
        next = next.saturating_add(document.num_tokens);
        let file = u32::try_from(files.len()).map_err(|_| "more files than 2^32".to_owned())?;
        entries.push(Entry { num_tokens: document.num_tokens, file, row: 0 });
        files.push(SourceFile {
            name: document.name,
            source_bytes: document.source_bytes,
            source_crc32: document.source_crc32,
            num_documents: 1,
            ..SourceFile::default()
        });
    }
    let index = Index {
        format: old.format,
        version: old.version,
        tokenizer: old.tokenizer,
        recipe: Recipe { field: "text".to_owned(), ..Recipe::default() },
        vocab_size: old.vocab_size,
        num_tokens: old.num_tokens,
        num_trained: old.num_tokens,
        largest_id: old.largest_id,
        num_documents: entries.len() as u64,
        documents_crc32: 0,
        shards: old.shards,
        files,
    };
    Ok((index, entries))
}

/// Whether a folder holds an index of ours, of any version.
pub fn is_prepared(folder: &Path) -> bool {
    let content = std::fs::read(folder.join(INDEX_FILE)).ok();
    let value = content.and_then(|content| serde_json::from_slice::<serde_json::Value>(&content).ok());
    value.is_some_and(|value| value.get("format").and_then(serde_json::Value::as_str) == Some(FORMAT))
}
