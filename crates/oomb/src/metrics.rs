//! What a run tells while it runs: one line of JSON per optimizer step, and progress for people. It must not know how a
//! step is computed.

mod file;
mod loading;
mod progress;
mod spikes;
mod tensorboard;

pub use file::MetricsFile;
pub use loading::Loading;
pub use progress::{Audience, Progress};
pub use spikes::Spikes;
pub use tensorboard::{EventFile, TENSORBOARD_FOLDER};

use serde::{Deserialize, Serialize};

/// Name of the file in a run's folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// One optimizer step, one line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// From 1.
    pub step: usize,
    /// Mean over all labels of the step, nats; not finite only where the step was skipped, and then `null` in the file.
    #[serde(deserialize_with = "nan_where_null")]
    pub loss: f64,
    /// Global norm of the gradient, before clipping; as the loss.
    #[serde(deserialize_with = "nan_where_null")]
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
    /// Bytes that came to the device in this step: pages, activations kept on the host, optimizer state; only where any did.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub in_bytes: u64,
    /// Bytes that went to the host.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub out_bytes: u64,
    /// Share of the pages of keys and values read in this step that were on the device already; only where not all were.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub page_hit_rate: Option<f64>,
    /// Passes over the data so far, with the fraction of the present one.
    pub epoch: f64,
    /// Mean over all labels of the validation sequences, nats; only where it was measured after this step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub validation_loss: Option<f64>,
    /// Loss or gradient were not finite, and the weights were left as they were (`run.on_not_finite`); only where so.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub skipped: bool,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// JSON has no NaN: it is written as `null`.
fn nan_where_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
