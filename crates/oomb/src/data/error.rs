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
    #[error("{path} has format version {got}, this program reads 1 to {wanted}: make it again with `oomb prepare … --overwrite`")]
    Version {
        /// The index.
        path: PathBuf,
        /// What was found.
        got: u32,
        /// The newest that this program reads.
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
    /// A row that cannot be used.
    #[error(
        "{path} row {row}: {problem}; mend the row, or leave such rows out with data.malformed = \"skip\" (--skip-malformed)"
    )]
    Row {
        /// The file.
        path: PathBuf,
        /// From 1.
        row: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A table that is none, or not of the wanted form.
    #[error("{path} as Parquet: {detail}")]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A Parquet file in a wrapping.
    #[error("{path} is a packed Parquet file: unpack it, Parquet is read at random and packs its columns itself")]
    Packed {
        /// The file.
        path: PathBuf,
    },
    /// A pattern that is none.
    #[error("{pattern} is not a pattern of files: {detail}")]
    Pattern {
        /// As given.
        pattern: String,
        /// What is wrong.
        detail: String,
    },
    /// A chat template that is missing or wrong.
    #[error("chat template {path}: {detail}")]
    Template {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Text where conversations are wanted.
    #[error("{path} is plain text, which has no conversations: give .jsonl or .parquet files, or set data.format = \"text\"")]
    NoConversations {
        /// The file.
        path: PathBuf,
    },
    /// A prepared folder that was made in another way than the configuration says.
    #[error(
        "{path} was prepared with {key} = \"{made}\", but data.{key} is \"{given}\"; remove the setting, or prepare the data again"
    )]
    OtherRecipe {
        /// The prepared folder.
        path: PathBuf,
        /// "format".
        key: &'static str,
        /// Of the folder.
        made: String,
        /// Of the configuration.
        given: String,
    },
    /// Sources that cannot be mixed.
    #[error("{path} was prepared with {other}, but the first of the sources with {first}: prepare all with one tokenizer")]
    MixedTokenizers {
        /// The prepared folder.
        path: PathBuf,
        /// The tokenizer that made it.
        other: String,
        /// The tokenizer of the first source.
        first: String,
    },
    /// Nothing is left once long documents are left out.
    #[error(
        "no document of {path} fits data.sequence_tokens = {sequence_tokens}: lengthen the sequence, or set data.long_documents = \"truncate\""
    )]
    NothingFits {
        /// The prepared folder.
        path: PathBuf,
        /// S.
        sequence_tokens: u64,
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
