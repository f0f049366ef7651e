//! What can go wrong with the checkpoints of a run, in words. It must not know how they are used.

use crate::config::Bytes;
use std::path::{Path, PathBuf};

/// A checkpoint that cannot be written, read or used.
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
    /// The tensors.
    #[error(transparent)]
    Tensors(#[from] crate::checkpoint::Error),
    /// Not what was written.
    #[error("{path} is damaged: {problem}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Wanted and got.
        problem: String,
    },
    /// Of another version of this program.
    #[error("{path} is of format version {got}, written by oomb {oomb}; this program reads version {wanted}")]
    Version {
        /// The file.
        path: PathBuf,
        /// What was found.
        got: u32,
        /// What this program reads.
        wanted: u32,
        /// The program's version.
        oomb: String,
    },
    /// There are checkpoints, and all are damaged.
    #[error("no checkpoint in {path} is intact:\n{problems}")]
    NoneIntact {
        /// The folder.
        path: PathBuf,
        /// One indented line for each.
        problems: String,
    },
    /// A checkpoint that is not there.
    #[error("{path} has no checkpoint {name}; there is {there}")]
    Missing {
        /// The folder.
        path: PathBuf,
        /// As asked for.
        name: String,
        /// What there is instead.
        there: String,
    },
    /// Too little space.
    #[error("{path} has {} free, but {what} {}: {hint}", Bytes(*free), Bytes(*wanted))]
    NoRoom {
        /// A folder on the file system.
        path: PathBuf,
        /// Bytes.
        free: u64,
        /// Completes "2 GiB free, but … 3 GiB".
        what: String,
        /// Bytes.
        wanted: u64,
        /// What to change.
        hint: &'static str,
    },
    /// The configuration is not the one of the run.
    #[error("this is not the configuration with which {path} was trained:\n{changes}\n{hint}")]
    Changed {
        /// The run's folder.
        path: PathBuf,
        /// One indented line for each key: old, new.
        changes: String,
        /// What to do.
        hint: String,
    },
    /// The data is not the data of the run.
    #[error(
        "data.train is not what {path} was trained on (CRC {got:08x}, wanted {wanted:08x}): restore the data, or start a new run from \
         the weights (oomb export)"
    )]
    OtherData {
        /// The checkpoint.
        path: PathBuf,
        /// Now.
        got: u32,
        /// When the checkpoint was written.
        wanted: u32,
    },
}

/// Result with this module's [`Error`].
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
