//! Checkpoints of a run, from which it continues exactly: what is in one, how it is written so that it is whole or absent,
//! and which of several is taken. It must not know devices or the training loop: values come and go by parameter.
//!
//! `checkpoints/step-N` holds `model/` (a Hugging Face folder with the weights in f32) or, with `[lora]`, `adapter/` (a PEFT
//! folder), `optimizer.safetensors` (both moments as they are stored), `state.json` ([`Saved`]), `config.toml`, and
//! `checksums.txt` over all of these.

mod changes;
mod error;
mod folder;
mod resume;
mod room;
mod save;
mod sums;

pub use changes::{Change, changes};
pub use error::{Error, Result};
pub use folder::{Checkpoint, Checkpoints, Newest};
pub use resume::{Beginning, Found, find};
pub use room::{check_room, check_writable, checkpoint_bytes, weight_bytes};
pub use save::{Contents, Moment, Source, Trained};

use crate::data::Cursor;
use serde::{Deserialize, Serialize};

/// Folder of the checkpoints in a run's folder.
pub const CHECKPOINTS_FOLDER: &str = "checkpoints";
/// Folder of the weights in a checkpoint.
pub const WEIGHTS_FOLDER: &str = "model";
/// Version of the format that this program writes and reads.
pub const VERSION: u32 = 1;

const STATE_FILE: &str = "state.json";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const FORMAT: &str = "oomb-checkpoint";

/// Everything of a run's state that is not a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// Steps that are done.
    pub step: usize,
    /// `run.seed`; all randomness is a function of it, the step and the place.
    pub seed: u64,
    /// Where the run stands in its data.
    pub cursor: Cursor,
    /// Of the training data, so that other data is noticed.
    pub data_crc32: u32,
    /// `"f32"` or `"bf16"`: in what the run computes.
    pub compute_dtype: String,
    /// How the moments are stored: `"f32"`, `"bf16"`, `"int8"`.
    #[serde(default = "f32_moments")]
    pub moments: String,
    /// Whether weights are kept in f32, themselves or as masters.
    #[serde(default = "f32_weights")]
    pub f32_weights: bool,
    /// Updates of the weights: steps without those that were skipped.
    pub updates: usize,
    /// Steps skipped since the last update.
    pub skipped_in_a_row: usize,
    /// Measured at this step, nats per label.
    pub validation_loss: Option<f64>,
    /// The lowest so far.
    pub best_validation_loss: Option<f64>,
}

/// Of checkpoints written before there was a choice.
fn f32_moments() -> String {
    "f32".to_owned()
}

/// The same.
fn f32_weights() -> bool {
    true
}

/// `state.json`: what says how to read the rest comes first.
#[derive(Serialize, Deserialize)]
struct StateFile {
    format: String,
    version: u32,
    oomb: String,
    state: serde_json::Value,
}
