//! Why a run ended early, or was not started, in words.

use std::path::PathBuf;

/// Why a run ended early, or was not started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Model files.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::Error),
    /// A preset that does not exist.
    #[error("there is no built-in model {name:?}; {hint}")]
    UnknownPreset {
        /// As written.
        name: String,
        /// The nearest, or all.
        hint: String,
    },
    /// `model.rope_scaling`.
    #[error("model.{0}")]
    Rope(String),
    /// `[lora]`, or an adapter.
    #[error("{0}")]
    Lora(String),
    /// How much memory there is.
    #[error("cannot tell how much memory this machine has: {0}")]
    HostMemory(String),
    /// Datasets.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// Memory.
    #[error(transparent)]
    DoesNotFit(#[from] crate::plan::DoesNotFit),
    /// Saved rates.
    #[error(transparent)]
    Rates(#[from] crate::rates::Error),
    /// The device.
    #[error(transparent)]
    Device(#[from] oomb_device::Error),
    /// Checkpoints of the run.
    #[error(transparent)]
    State(#[from] crate::state::Error),
    /// A checkpoint could not be written.
    #[error("the checkpoint of step {step} could not be saved; {last}")]
    NotSaved {
        /// Optimizer step, from 1.
        step: usize,
        /// What there is to go on from.
        last: String,
        /// Why.
        source: Box<crate::state::Error>,
    },
    /// The checkpoint is of a model of another shape.
    #[error("{path} holds other parameters than the model of this configuration: was model.path changed?")]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The checkpoint's optimizer state is of another kind than the run's.
    #[error(
        "{path} has {was}, this run was planned with {is}: set optimizer.state_dtype and optimizer.master_weights to what the \
         checkpoint has; to change them, `oomb export` the weights and start a new run with model.path set to the export"
    )]
    OtherState {
        /// The checkpoint.
        path: PathBuf,
        /// In words.
        was: String,
        /// In words.
        is: String,
    },
    /// Loss, gradient or weights are no longer numbers.
    #[error("step {step}: {problem}; training stopped\n{next}")]
    NotFinite {
        /// Optimizer step, from 1.
        step: usize,
        /// What is not finite, and where first.
        problem: String,
        /// What there is to go on from, and what to change.
        next: String,
    },
    /// The observer could not write down what happened.
    #[error(transparent)]
    Observer(#[from] std::io::Error),
}

/// Result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
