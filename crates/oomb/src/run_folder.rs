//! The folder of a run: that it is new, the resolved configuration and the finished model in it, and that one process
//! trains in it. It must not know what else is put there.

use crate::config::Config;
use crate::metrics::METRICS_FILE;
use std::fs::{self, File};
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

/// Name of the folder of the trained adapter in a run's folder: as PEFT saves one.
pub const ADAPTER_FOLDER: &str = "adapter";
/// Held by the process that trains in the folder.
const LOCK_FILE: &str = ".lock";

/// Name of the folder of what a run trains: [`ADAPTER_FOLDER`] or [`MODEL_FOLDER`].
pub fn trained_folder(config: &Config) -> &'static str {
    if config.lora.is_some() { ADAPTER_FOLDER } else { MODEL_FOLDER }
}

/// A folder that a run cannot have.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A run lives there.
    #[error("{path} holds a run: go on with it by --resume, or set run.out to a new folder; nothing was written")]
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
    /// Another process trains there.
    #[error("another process trains in {path} now")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// "create".
        action: &'static str,
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
        Err(source) => Err(Error::Io { action: "read", path, source }),
    }
}

/// Creates the folder with the resolved configuration in it: both or neither.
///
/// # Errors
/// As [`check_new`], and if the system refuses.
pub fn create(config: &Config) -> Result<(), Error> {
    let folder = &config.run.out;
    check_new(folder)?;
    let parent = parent(folder);
    fs::create_dir_all(parent).map_err(io("create", parent))?;
    let partial = parent.join(format!(".{}.partial", folder.file_name().unwrap_or_default().to_string_lossy()));
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(io("remove", &partial))?;
    }
    fs::create_dir(&partial).map_err(io("create", &partial))?;
    write_synced(&partial.join(CONFIG_FILE), config)?;
    sync(&partial)?;
    fs::rename(&partial, folder).map_err(io("create", folder))?;
    sync(parent)
}

/// Replaces the resolved configuration of a run that goes on; whole at every moment.
///
/// # Errors
/// If the system refuses.
pub fn update(config: &Config) -> Result<(), Error> {
    let folder = &config.run.out;
    let (path, partial) = (folder.join(CONFIG_FILE), folder.join(format!(".{CONFIG_FILE}.partial")));
    write_synced(&partial, config)?;
    fs::rename(&partial, &path).map_err(io("replace", &path))?;
    sync(folder)
}

/// Keeps other processes from training in the folder until the returned file is dropped.
///
/// # Errors
/// If another process does so already, or the system refuses.
pub fn lock(folder: &Path) -> Result<File, Error> {
    let path = folder.join(LOCK_FILE);
    let file = File::create(&path).map_err(io("create", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::InUse { path: folder.to_path_buf() }),
        Err(fs::TryLockError::Error(source)) => Err(io("lock", &path)(source)),
    }
}

/// Puts what was trained in its place, the folder `name`; `save` writes it as the folder that it is given. One from before
/// stays until the new one is whole.
///
/// # Errors
/// What `save` says, and if the system refuses.
pub fn put_trained<E: From<Error>>(folder: &Path, name: &str, save: impl FnOnce(&Path) -> Result<(), E>) -> Result<PathBuf, E> {
    let (trained, fresh) = (folder.join(name), folder.join(format!("{name}.new")));
    remove_unfinished(folder, name)?;
    save(&fresh)?;
    if trained.exists() {
        fs::remove_dir_all(&trained).map_err(io("remove", &trained))?;
    }
    fs::rename(&fresh, &trained).map_err(io("create", &trained))?;
    sync(folder)?;
    Ok(trained)
}

/// What a process left that died while it saved the folder `trained`.
fn remove_unfinished(folder: &Path, trained: &str) -> Result<(), Error> {
    for entry in fs::read_dir(folder).map_err(io("read", folder))? {
        let path = entry.map_err(io("read", folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.trim_start_matches('.').starts_with(&format!("{trained}.new")) {
            fs::remove_dir_all(&path).map_err(io("remove", &path))?;
        }
    }
    Ok(())
}

fn parent(folder: &Path) -> &Path {
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_synced(path: &Path, config: &Config) -> Result<(), Error> {
    let write = |mut file: File| file.write_all(config.to_toml().as_bytes()).and_then(|()| file.sync_all());
    File::create(path).and_then(write).map_err(io("write", path))
}

fn sync(folder: &Path) -> Result<(), Error> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io("sync", folder))
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { action, path, source }
}

/// Writes the plan of a run, as `oomb plan` prints it, into its folder.
///
/// # Errors
/// If the system refuses.
pub fn write_plan(folder: &Path, plan: &str) -> Result<(), Error> {
    let path = folder.join(PLAN_FILE);
    fs::write(&path, plan).map_err(io("write", &path))
}
