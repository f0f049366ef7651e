//! What can be wrong with data, in words. It must not know who reads it.

use std::path::PathBuf;

/// A fault of the user's data, or of the files we made of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// "read", "write", "create" …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not UTF-8.
    #[error("{path} is not UTF-8 text: byte {offset} is {byte:#04x}; convert it, or leave it out")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Of the first wrong byte.
        offset: u64,
        /// The first wrong byte.
        byte: u8,
    },
    /// Nothing to learn from.
    #[error("{what} has no tokens{hint}")]
    Empty {
        /// File, folder or list.
        what: String,
        /// What to change.
        hint: &'static str,
    },
    /// A sequence longer than the data.
    #[error(
        "data.sequence_tokens = {sequence_tokens} is longer than the data: {path} has {num_tokens} tokens; \
         shorten the sequence, or add text"
    )]
    SequenceTooLong {
        /// S.
        sequence_tokens: u64,
        /// All tokens there are.
        num_tokens: u64,
        /// The prepared folder.
        path: PathBuf,
    },
    /// A token that the model does not have.
    #[error(
        "{path} holds token id {id}, outside the vocabulary of {vocab_size} of the model; prepare the data with the model's \
         own tokenizer"
    )]
    OutsideVocabulary {
        /// The prepared folder.
        path: PathBuf,
        /// The largest id.
        id: u32,
        /// V.
        vocab_size: usize,
    },
    /// A prepared folder that is damaged.
    #[error("{path} is damaged: {detail}; make it again with `oomb prepare … --overwrite`")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Wanted and got.
        detail: String,
    },
    /// A prepared folder of another version of this program.
    #[error("{path} has format version {got}, this program reads {wanted}: make it again with `oomb prepare … --overwrite`")]
    Version {
        /// The index.
        path: PathBuf,
        /// What was found.
        got: u32,
        /// What this program reads.
        wanted: u32,
    },
    /// An output folder that must not be touched.
    #[error("{path} {problem}; nothing was written")]
    OutputExists {
        /// The folder.
        path: PathBuf,
        /// What is in it and what to do.
        problem: &'static str,
    },
    /// No tokenizer, or one that cannot be used.
    #[error("tokenizer {path}: {detail}")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Text without a tokenizer.
    #[error(
        "{path} is text, which needs a tokenizer: set data.tokenizer to \"bytes\", a tokenizer.json, or the folder of the \
         checkpoint"
    )]
    NoTokenizer {
        /// The first text file.
        path: PathBuf,
    },
    /// A prepared folder and a tokenizer that did not make it.
    #[error("{path} was prepared with {made}, but data.tokenizer is {given}; remove the setting, or prepare the data again")]
    OtherTokenizer {
        /// The prepared folder.
        path: PathBuf,
        /// The tokenizer that made it.
        made: String,
        /// The tokenizer of the configuration.
        given: String,
    },
    /// A list that mixes what cannot be mixed.
    #[error("{path} is a prepared folder: it must be the only path, got {count} paths")]
    MixedSources {
        /// The prepared folder.
        path: PathBuf,
        /// Paths in the list.
        count: usize,
    },
}

impl Error {
    /// Wraps what the system said about `path`.
    pub(super) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

/// Result with the data [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
