//! Whether a file system takes what a run will write. It must not know what that is.

use super::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::lora::{LoraConfig, trained_specs};
use crate::model::params::ParamSpec;
use oomb_device::DType;
use oomb_device::ops::moments::BLOCK_ELEMENTS;
use rustix::fs::{Access, access, statvfs};
use std::path::Path;

/// Bytes of headers, configuration and the like, beside the tensors.
const SMALL_FILES_BYTES: u64 = 64 << 10;

/// Bytes of what is trained in f32.
pub fn weight_bytes(model: &ModelConfig, lora: Option<&LoraConfig>) -> u64 {
    4 * trained_specs(model, lora).iter().map(ParamSpec::len).sum::<usize>() as u64
}

/// Bytes of one checkpoint: what is trained in f32, and both moments as they are stored.
pub fn checkpoint_bytes(model: &ModelConfig, lora: Option<&LoraConfig>, moments: DType) -> u64 {
    let weights = weight_bytes(model, lora);
    let moment_bytes = match moments {
        DType::Bf16 => 2.0,
        // And scales.
        DType::U8 => 1.0 + 4.0 / BLOCK_ELEMENTS as f64,
        _ => 4.0,
    };
    weights + (weights as f64 / 4.0 * 2.0 * moment_bytes) as u64 + SMALL_FILES_BYTES
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
