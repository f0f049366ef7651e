//! Text to token ids: bytes, or a Hugging Face `tokenizer.json`. It must not know files of text or shards.

use super::bytes::tokenizer_json;
use super::error::{Error, Result};
use crate::config::TokenizerSource;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Which tokenizer made a dataset: enough to tell two apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TokenizerIdentity {
    /// Each byte is a token.
    Bytes,
    /// A `tokenizer.json`.
    HuggingFace {
        /// CRC-32 of the file.
        crc32: u32,
        /// Length of the file.
        file_bytes: u64,
    },
}

impl fmt::Display for TokenizerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("the byte tokenizer"),
            Self::HuggingFace { crc32, file_bytes } => write!(f, "a tokenizer.json of {file_bytes} bytes (CRC {crc32:08x})"),
        }
    }
}

/// A tokenizer that adds no special tokens.
pub struct Tokenizer {
    kind: Kind,
    identity: TokenizerIdentity,
}

enum Kind {
    Bytes,
    HuggingFace { path: PathBuf, inner: Box<tokenizers::Tokenizer>, vocab_size: usize, special_tokens: Vec<String> },
}

impl Tokenizer {
    const BYTES: Self = Self { kind: Kind::Bytes, identity: TokenizerIdentity::Bytes };

    /// Loads the tokenizer that a configuration names.
    ///
    /// # Errors
    /// If the file is missing, or is not a tokenizer.
    pub fn load(source: &TokenizerSource) -> Result<Self> {
        let given = match source {
            TokenizerSource::Bytes => return Ok(Self::BYTES),
            TokenizerSource::Path(path) => path,
        };
        let path = if given.is_dir() { given.join("tokenizer.json") } else { given.clone() };
        let wrong = |detail: String| Error::Tokenizer { path: path.clone(), detail };
        let content = std::fs::read(&path)
            .map_err(|e| wrong(format!("cannot read it: {e}; give \"bytes\", a tokenizer.json, or a folder that has one")))?;
        if content == tokenizer_json().as_bytes() {
            return Ok(Self::BYTES);
        }
        let not_one = |detail: String| wrong(format!("not a tokenizer.json: {detail}"));
        // The library panics at some texts that are no JSON: they are refused before it sees them.
        serde_json::from_slice::<serde::de::IgnoredAny>(&content).map_err(|e| not_one(e.to_string()))?;
        let read = contained(|| tokenizers::Tokenizer::from_bytes(&content));
        let mut inner = read.map_err(not_one)?;
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        inner.with_padding(None);
        // It would add the special tokens that we never ask for, and trim the offsets that we do ask for.
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let special_tokens = inner.get_added_tokens_decoder().into_values().filter(|token| token.special);
        let special_tokens = special_tokens.map(|token| token.content).collect();
        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let identity = TokenizerIdentity::HuggingFace { crc32: crc32fast::hash(&content), file_bytes: content.len() as u64 };
        Ok(Self { kind: Kind::HuggingFace { path, inner: Box::new(inner), vocab_size, special_tokens }, identity })
    }

    /// What tells it from another.
    pub fn identity(&self) -> &TokenizerIdentity {
        &self.identity
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => 256,
            Kind::HuggingFace { vocab_size, .. } => *vocab_size,
        }
    }

    /// Writes it as a `tokenizer.json`.
    ///
    /// # Errors
    /// If the system refuses.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        match self.file() {
            Some(file) => std::fs::copy(file, path).map(drop).map_err(Error::io("copy", file)),
            None => std::fs::write(path, tokenizer_json()).map_err(Error::io("write", path)),
        }
    }

    /// The `tokenizer.json`, where there is one.
    pub fn file(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace { path, .. } => Some(path),
        }
    }

    /// The token ids of `text`, without special tokens at its ends.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace { path, inner, .. } => {
                let encoded = contained(|| inner.encode_fast(text, false)).map_err(|e| refused(path, &e))?;
                Ok(encoded.get_ids().to_vec())
            }
        }
    }

    /// The token ids of `text` with the bytes that each stands for: they follow each other without gaps, save that several
    /// tokens for one character have the same.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_with_ranges(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        match &self.kind {
            Kind::Bytes => Ok((self.encode(text)?, (0..text.len()).map(|at| at..at + 1).collect())),
            Kind::HuggingFace { path, inner, .. } => {
                let encoded = inner.encode(text, false).map_err(|e| refused(path, &e.to_string()))?;
                let mut end = 0;
                let ranges = encoded.get_offsets().iter().map(|&(from, to)| {
                    // What a normaliser dropped belongs to the token after it.
                    let range = from.min(end)..to.max(end);
                    end = range.end;
                    range
                });
                Ok((encoded.get_ids().to_vec(), ranges.collect()))
            }
        }
    }

    /// The special tokens as text: those that a tokenizer finds in text and never splits.
    pub fn special_tokens(&self) -> &[String] {
        match &self.kind {
            Kind::Bytes => &[],
            Kind::HuggingFace { special_tokens, .. } => special_tokens,
        }
    }

    /// The text of `ids`, special tokens as they are written; bytes that are no text become U+FFFD.
    ///
    /// # Errors
    /// If the tokenizer refuses.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Bytes => {
                // 0xFF is never a part of UTF-8, so what is no byte becomes U+FFFD as well.
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xFF)).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace { path, inner, .. } => inner
                .decode(ids, false)
                .map_err(|e| Error::Tokenizer { path: path.clone(), detail: format!("cannot decode {} tokens: {e}", ids.len()) }),
        }
    }

    /// The token ids of several texts at once, on all cores.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_all(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        match &self.kind {
            Kind::Bytes => texts.iter().map(|text| self.encode(text)).collect(),
            Kind::HuggingFace { path, inner, .. } => {
                let encoded = contained(|| inner.encode_batch_fast(texts.to_vec(), false)).map_err(|e| refused(path, &e))?;
                Ok(encoded.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
            }
        }
    }

    /// Whether a text may be cut between `left` and `right` without changing a token: shown by tokenising both ways.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(super) fn splits_between(&self, left: &str, right: &str) -> Result<bool> {
        if matches!(self.kind, Kind::Bytes) {
            return Ok(true);
        }
        let mut apart = self.encode(left)?;
        apart.extend(self.encode(right)?);
        Ok(apart == self.encode(&format!("{left}{right}"))?)
    }
}

/// Runs a call of the tokenizer library, whose panics at unusual files are errors here: the file is the user's.
fn contained<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(outcome) => outcome.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(format!("the tokenizer library gave up: {}", text.unwrap_or_default()))
        }
    }
}

fn refused(path: &Path, detail: &str) -> Error {
    Error::Tokenizer { path: path.to_path_buf(), detail: format!("cannot encode the text: {detail}") }
}
