//! What can be wrong with a checkpoint folder, in words. It must not know how one is read.

use crate::model::families::ConfigError;
use std::path::{Path, PathBuf};

/// A checkpoint that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// "read", "create".
        action: &'static str,
        /// Of what.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No checkpoint here.
    #[error("{folder} is not a Hugging Face checkpoint: {problem}")]
    NotACheckpoint {
        /// The folder as given.
        folder: PathBuf,
        /// What is missing, and what to do.
        problem: String,
    },
    /// `config.json` describes something that this program cannot train.
    #[error("{path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// Key, wanted, got.
        source: ConfigError,
    },
    /// A file is damaged: truncated, or not what its name says.
    #[error("{path} is damaged: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Wanted and got.
        problem: String,
    },
    /// The tensors are not those that `config.json` calls for.
    #[error("the tensors in {folder} do not match its config.json:\n{problems}")]
    Mismatch {
        /// The folder.
        folder: PathBuf,
        /// One indented line for each kind of mismatch, with up to five names.
        problems: String,
    },
    /// No adapter here.
    #[error("{folder} is not a PEFT adapter: {problem}")]
    NotAnAdapter {
        /// The folder as given.
        folder: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// An adapter's tensors are not those that this model would have.
    #[error("the adapter in {folder} was not made for this model, or not in this way:\n{problems}")]
    AdapterMismatch {
        /// The folder.
        folder: PathBuf,
        /// As for [`Self::Mismatch`].
        problems: String,
    },
    /// The place to write to is taken.
    #[error("{path} {problem}; nothing was written")]
    Occupied {
        /// The output folder.
        path: PathBuf,
        /// Why it cannot be used, and what to do.
        problem: &'static str,
    },
    /// The weights could not be fetched from the device.
    #[error(transparent)]
    Device(#[from] oomb_device::Error),
}

/// Result with the checkpoint [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(super) fn damaged(path: &Path, problem: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), problem: problem.into() }
    }
}
