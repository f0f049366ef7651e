//! A run, or several side by side, as one HTML page that needs no other file. It must not know how a run is made: it reads
//! what a run's folder holds.

mod chart;
mod page;
mod read;

pub use read::{Bucket, RunFiles, Step};

use std::fs;
use std::path::{Path, PathBuf};

/// Name of the page in a run's folder.
pub const REPORT_FILE: &str = "report.html";

/// How a page of ours begins: nothing else is overwritten.
const MARK: &str = "<!doctype html>\n<!-- made by oomb report -->\n";

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing to read.
    #[error("{path} is not a run: {problem}")]
    NotARun {
        /// As given.
        path: PathBuf,
        /// What is missing, and what to give instead.
        problem: String,
    },
    /// The system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Somebody else's file.
    #[error("{0} is there and is not a report: name another file with --out; nothing was written")]
    Occupied(PathBuf),
}

/// Result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

/// The page of these runs, of which there is at least one; they appear in this order.
pub fn html(runs: &[RunFiles]) -> String {
    format!("{MARK}{}", page::page(runs))
}

/// Reads the runs and writes their page to `out`, over an older page if there is one.
///
/// # Errors
/// If a run has no steps, a file cannot be read or written, or `out` is something else.
pub fn write(runs: &[PathBuf], out: &Path) -> Result<()> {
    let runs = read::open_all(runs)?;
    match fs::read(out) {
        Ok(old) if !old.starts_with(MARK.as_bytes()) => return Err(Error::Occupied(out.to_path_buf())),
        _ => {}
    }
    fs::write(out, html(&runs)).map_err(Error::io("write", out))
}
