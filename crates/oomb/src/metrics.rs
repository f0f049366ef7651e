//! What a run tells while it runs: one line of JSON per optimizer step, and progress for people. It must not know how a
//! step is computed.

mod loading;
mod progress;
mod tensorboard;

pub use loading::Loading;
pub use progress::{Audience, Progress};
pub use tensorboard::{EventFile, TENSORBOARD_FOLDER};

use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Name of the file in a run's folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// One optimizer step, one line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// From 1.
    pub step: usize,
    /// Mean over all labels of the step, nats.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of this step.
    pub tokens: usize,
    /// Wall time of this step, without validation.
    pub seconds: f64,
    /// `tokens / seconds`.
    pub tokens_per_second: f64,
    /// Device memory allocated, bytes.
    pub device_bytes: u64,
    /// Page-locked host memory allocated, bytes.
    pub host_bytes: u64,
    /// Passes over the data so far, with the fraction of the present one.
    pub epoch: f64,
    /// Mean over all labels of the validation sequences, nats; only where it was measured after this step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub validation_loss: Option<f64>,
}

/// `metrics.jsonl` of a run, appended to step by step.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
}

impl MetricsFile {
    /// Creates the file in `folder`.
    ///
    /// # Errors
    /// If it exists, or cannot be created.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let path = folder.join(METRICS_FILE);
        let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot create {}: {e}", path.display()));
        let file = OpenOptions::new().append(true).create_new(true).open(&path).map_err(named)?;
        Ok(Self { file })
    }

    /// Appends one line; it is with the system when this returns, so that a killed run keeps it.
    ///
    /// # Errors
    /// If the system refuses, most often because the disk is full.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot write {METRICS_FILE}: {e}"));
        self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush()).map_err(named)
    }
}
