//! The folder of a run: that it is new, and the resolved configuration in it. It must not know what else is put there.

use crate::config::Config;
use crate::metrics::METRICS_FILE;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Name of the resolved configuration in a run's folder.
pub const CONFIG_FILE: &str = "config.toml";

/// Name of the folder of the trained model in a run's folder: a Hugging Face checkpoint.
pub const MODEL_FOLDER: &str = "model";

/// Name of the plan in a run's folder: every buffer, as `oomb plan` prints it.
pub const PLAN_FILE: &str = "plan.txt";

/// Name of the last evaluation in a run's folder.
pub const EVALUATION_FILE: &str = "eval.json";

/// A folder that a run cannot have.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A run lives there.
    #[error("{path} is the folder of another run: set run.out to a new folder, or move the old one away; nothing was written")]
    OtherRun {
        /// The folder.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{path} {problem}: set run.out to a new folder; nothing was written")]
    Occupied {
        /// The folder.
        path: PathBuf,
        /// "is not empty".
        problem: &'static str,
    },
    /// The system refused.
    #[error("cannot create {path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Refuses a folder that exists and is not empty. To be asked before any work.
///
/// # Errors
/// Says what is there and what to change.
pub fn check_new(folder: &Path) -> Result<(), Error> {
    let path = folder.to_path_buf();
    if !folder.exists() {
        return Ok(());
    }
    if !folder.is_dir() {
        return Err(Error::Occupied { path, problem: "is a file" });
    }
    if [CONFIG_FILE, METRICS_FILE].iter().any(|file| folder.join(file).exists()) {
        return Err(Error::OtherRun { path });
    }
    match fs::read_dir(folder).map(|mut entries| entries.next().is_some()) {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::Occupied { path, problem: "is not empty" }),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// Creates the folder and writes the resolved configuration into it.
///
/// # Errors
/// As [`check_new`], and if the system refuses.
pub fn create(config: &Config) -> Result<(), Error> {
    let folder = &config.run.out;
    check_new(folder)?;
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Io { path, source }
    };
    fs::create_dir_all(folder).map_err(io(folder))?;
    let path = folder.join(CONFIG_FILE);
    let mut file = fs::File::create_new(&path).map_err(io(&path))?;
    file.write_all(config.to_toml().as_bytes()).map_err(io(&path))
}

/// Writes the plan of a run, as `oomb plan` prints it, into its folder.
///
/// # Errors
/// If the system refuses.
pub fn write_plan(folder: &Path, plan: &str) -> Result<(), Error> {
    let path = folder.join(PLAN_FILE);
    fs::write(&path, plan).map_err(|source| Error::Io { path, source })
}
