//! What can be wrong with a configuration, in words. It must not know the settings themselves.

use std::path::PathBuf;

/// A mistake in a configuration file or in a `--set` override.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}")]
    Read {
        /// The file as given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{origin} is not valid TOML:\n{detail}")]
    Syntax {
        /// File or override.
        origin: String,
        /// The parser's message with line and column.
        detail: String,
    },
    /// `--set` without `section.key=value`.
    #[error("--set {text}: {problem}")]
    Override {
        /// The override as given.
        text: String,
        /// What it lacks.
        problem: String,
    },
    /// A key or section that does not exist.
    #[error("{origin}: unknown {what}{hint}")]
    Unknown {
        /// File or override.
        origin: String,
        /// "key `schedule.chunk`" or "section [schedul]".
        what: String,
        /// The nearest that does exist, or all of them.
        hint: String,
    },
    /// A value of another type.
    #[error("{origin}: {key} must be {wanted}, got {got}")]
    WrongType {
        /// File or override.
        origin: String,
        /// `section.key`.
        key: String,
        /// What is accepted.
        wanted: String,
        /// What was there.
        got: String,
    },
    /// A required key that is absent.
    #[error("{origin}: {key} is missing: {hint}")]
    Missing {
        /// The file.
        origin: String,
        /// `section.key`.
        key: String,
        /// What to write.
        hint: &'static str,
    },
    /// A value out of range, or at odds with another setting.
    #[error("{origin}: {key} {problem}")]
    Invalid {
        /// File or override.
        origin: String,
        /// `section.key`.
        key: String,
        /// What is wrong and what to change.
        problem: String,
    },
}

/// Result with the configuration [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
