//! Whether a file system takes what a run will write. It must not know what that is.

use super::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::lora::{LoraConfig, trained_specs};
use crate::model::params::ParamSpec;
use rustix::fs::{Access, access, statvfs};
use std::path::Path;

/// Bytes of headers, configuration and the like, beside the tensors.
const SMALL_FILES_BYTES: u64 = 64 << 10;

/// Bytes of one checkpoint: what is trained and both moments in f32.
pub fn checkpoint_bytes(model: &ModelConfig, lora: Option<&LoraConfig>) -> u64 {
    let parameters: usize = trained_specs(model, lora).iter().map(ParamSpec::len).sum();
    3 * 4 * parameters as u64 + SMALL_FILES_BYTES
}

/// Refuses where less than `wanted` bytes are free at `path`, or at the nearest folder above that exists; `what` names the
/// user of the bytes ("the checkpoints of this run need"). Says nothing where the system does not know.
///
/// # Errors
/// Free and wanted.
pub fn check_room(path: &Path, wanted: u64, what: &str, hint: &'static str) -> Result<()> {
    let folder = existing(path);
    let Ok(system) = statvfs(folder) else { return Ok(()) };
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if free >= wanted {
        return Ok(());
    }
    Err(Error::NoRoom { path: folder.to_owned(), free, what: what.to_owned(), wanted, hint })
}

/// Refuses a place that cannot be written to, before any work is done for it.
///
/// # Errors
/// What the system says.
pub fn check_writable(path: &Path) -> Result<()> {
    let folder = existing(path);
    access(folder, Access::WRITE_OK).map_err(|error| Error::io("write to", folder)(error.into()))
}

/// The path itself, or the nearest folder above it that exists.
fn existing(path: &Path) -> &Path {
    let here = Path::new(".");
    path.ancestors().map(|path| if path.as_os_str().is_empty() { here } else { path }).find(|path| path.exists()).unwrap_or(here)
}
