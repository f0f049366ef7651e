//! From a configuration to a run: the model, the data, the machine and the plan brought together, then the loop over
//! optimizer steps. It must not know terminals: what happens is told to an [`Observer`].

mod checkpoints;
mod error;
mod load;
mod lora;
mod training;

use crate::config::{
    Config, DEFAULT_CHUNK_TOKENS, GradDtype, Keep as KeepSetting, LrSchedule, OptimizerSettings, Placement, StateDtype,
};
use crate::data::Windows;
use crate::engine::{Engine, machine};
use crate::kv::Traffic;
use crate::kv::select::Selection;
use crate::model::activations::Keep;
use crate::model::config::ModelConfig;
use crate::plan::optimizer::StateRequest;
use crate::plan::{Machine, Plan, Request, Tier, Training};
use crate::rates;
use crate::train::{self, LossSum, StepLoss, Update};
pub use checkpoints::with_state_of;
pub use error::{Error, Result};
pub use load::{Loading, ModelFiles, load_weights, save_weights};
pub use lora::{Lora, save_adapter};
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, DType};
use std::path::PathBuf;
use std::time::Duration;
pub use training::Run;

/// What one optimizer step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRecord {
    /// From 1.
    pub step: usize,
    /// Loss, gradient norm, tokens.
    pub loss: StepLoss,
    /// Whether the weights were changed by it.
    pub outcome: Outcome,
    /// Learning rate of this step.
    pub lr: f64,
    /// Wall time of the step.
    pub elapsed: Duration,
    /// Times the data has been seen, the step included.
    pub epochs: f64,
    /// Device bytes allocated, workspace included.
    pub device_bytes: u64,
    /// Pinned host bytes allocated.
    pub host_bytes: u64,
    /// Between host and device in this step.
    pub traffic: Traffic,
}

/// What came of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The weights were updated.
    Updated,
    /// Loss or gradient were not finite: the weights are as they were.
    Skipped,
}

/// How [`Run::train`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// All steps are done.
    Done,
    /// It was asked to stop after this step, and saved a checkpoint.
    Interrupted {
        /// Steps done.
        step: usize,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
}

/// Who is told what happens.
pub trait Observer {
    /// After an optimizer step; `validation` where it was due.
    ///
    /// # Errors
    /// Ends the run.
    fn step(&mut self, record: &StepRecord, validation: Option<LossSum>) -> std::io::Result<()>;

    /// Something that a person wants to know: a skipped step, a checkpoint.
    ///
    /// # Errors
    /// Ends the run.
    fn note(&mut self, text: &str) -> std::io::Result<()>;

    /// Before a checkpoint is written: what was told so far must be on the disk when this returns.
    ///
    /// # Errors
    /// Ends the run.
    fn sync(&mut self) -> std::io::Result<()>;

    /// Asked after each step: whether the run should save its state and end.
    fn wants_to_stop(&self) -> bool;
}

/// What the plan needs to know of a configuration and the model it names, but for [`Lora`].
pub fn request(config: &Config, model: &ModelConfig) -> Request {
    let keep = match config.schedule.keep {
        KeepSetting::Auto => None,
        KeepSetting::Inputs => Some(Keep::Inputs),
        KeepSetting::Attention => Some(Keep::Attention),
        KeepSetting::Mlp => Some(Keep::Mlp),
        KeepSetting::All => Some(Keep::All),
    };
    Request {
        model: model.clone(),
        sequence_tokens: config.data.sequence_tokens,
        sequences_per_step: config.data.sequences_per_step,
        chunk_tokens: config
            .schedule
            .chunk_tokens
            .unwrap_or_else(|| DEFAULT_CHUNK_TOKENS.next_multiple_of(config.kv.page_tokens)),
        page_tokens: config.kv.page_tokens,
        group_pages: config.kv.group_pages.unwrap_or(DEFAULT_GROUP_PAGES),
        prefetch_groups: config.kv.prefetch_groups,
        loss_tile_tokens: config.schedule.loss_tile_tokens,
        device_budget: config.kv.device_budget_bytes,
        keep_budget: config.schedule.keep_budget_bytes,
        keep_host_budget: config.schedule.keep_host_budget_bytes,
        grad_dtype: match config.kv.grad_dtype {
            GradDtype::F32 => DType::F32,
            GradDtype::Bf16 => DType::Bf16,
        },
        lora: None,
        training: Some(Training { keep, optimizer: true }),
        optimizer_state: {
            let OptimizerSettings { state_dtype, master_weights, placement, .. } = config.optimizer;
            state_request(state_dtype, master_weights, placement)
        },
    }
}

/// What the plan may choose of the optimizer's state.
pub fn state_request(state_dtype: StateDtype, master_weights: Option<bool>, placement: Placement) -> StateRequest {
    StateRequest {
        dtype: moments_dtype(state_dtype),
        master_weights,
        tier: match placement {
            Placement::Auto => None,
            Placement::Device => Some(Tier::Device),
            Placement::Host => Some(Tier::Host),
        },
        ..StateRequest::default()
    }
}

/// Storage of the moments; `None` where the plan chooses.
pub fn moments_dtype(setting: StateDtype) -> Option<DType> {
    match setting {
        StateDtype::Auto => None,
        StateDtype::F32 => Some(DType::F32),
        StateDtype::Bf16 => Some(DType::Bf16),
        StateDtype::Int8 => Some(DType::U8),
    }
}

/// The plan of a training run: with the chunk size that the configuration says, or that is predicted to be the fastest on this
/// `hardware`; where nothing is known of that, the default.
///
/// # Errors
/// If it does not fit, or there are saved rates that cannot be read.
pub fn plan(config: &Config, request: &Request, machine: &Machine, hardware: &str) -> Result<Plan> {
    let rates = if config.schedule.chunk_tokens.is_none() { rates::of(hardware)? } else { None };
    Ok(match rates {
        Some((rates, _)) => request.fastest(machine, &rates, config.kv.selection)?,
        None => Plan::new(request, machine)?,
    })
}

/// Pages that move together where the configuration does not say: 4 MiB of k, v at Qwen2.5-7B's shape, long enough for
/// the full rate of the link.
pub const DEFAULT_GROUP_PAGES: usize = 16;

/// Learning rate of `step` (from 1): linear warm-up over `warmup_steps`, then cosine or linear decay, or constant. The
/// decay begins at the last step of warm-up (the first step where there is none) and would reach `min_lr` one step after
/// the last, so that no step is wasted at rate 0; transformers' `get_cosine_schedule_with_warmup` does the same.
pub fn learning_rate(config: &Config, step: usize) -> f64 {
    let (optimizer, steps) = (&config.optimizer, config.run.steps);
    let (lr, min_lr, warmup) = (optimizer.lr, optimizer.min_lr, optimizer.warmup_steps);
    if step <= warmup {
        return lr * step as f64 / warmup as f64;
    }
    let peak = warmup.max(1);
    let progress = (step - peak) as f64 / (steps + 1).saturating_sub(peak).max(1) as f64;
    match optimizer.schedule {
        LrSchedule::Constant => lr,
        LrSchedule::Linear => lr + (min_lr - lr) * progress,
        LrSchedule::Cosine => min_lr + (lr - min_lr) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    }
}

/// Seed of the stochastic rounding in `step`.
fn step_seed(config: &Config, step: usize) -> u64 {
    config.run.seed.wrapping_add((step as u64) << 32)
}

/// How `step` changes the weights, as update number `update`.
fn update_of(config: &Config, step: usize, update: usize) -> Update {
    let optimizer = &config.optimizer;
    Update {
        hyper: AdamW {
            lr: learning_rate(config, step) as f32,
            beta1: optimizer.betas.0 as f32,
            beta2: optimizer.betas.1 as f32,
            eps: optimizer.eps as f32,
            weight_decay: optimizer.weight_decay as f32,
            step: u32::try_from(update).expect("steps fit 32 bits"),
        },
        clip_norm: optimizer.clip_norm.map(|norm| norm as f32),
        decay_norms_and_biases: optimizer.decay_norms_and_biases,
        seed: step_seed(config, step),
    }
}

/// The loss of the first `sequences` windows; `progress` is told (done, sum so far).
///
/// # Errors
/// If data cannot be read or the device fails.
pub fn evaluate<B: Backend>(
    engine: &mut Engine<B>,
    windows: &Windows,
    sequences: usize,
    progress: &mut dyn FnMut(usize, LossSum),
) -> Result<LossSum> {
    let mut total = LossSum::default();
    for window in 0..windows.len().min(sequences) {
        let loss = train::evaluate(engine, &windows.get(window)?)?;
        total.sum += loss.sum;
        total.labels += loss.labels;
        progress(window + 1, total);
    }
    Ok(total)
}

/// An engine that only evaluates, with the weights of `files` and its adapter beside them, as in training: merged into bf16
/// weights, small changes would be rounded away.
///
/// # Errors
/// If it does not fit `machine`, or the device fails.
pub fn evaluator<B: Backend>(
    device: &B,
    machine: &Machine,
    request: &Request,
    files: &ModelFiles,
    selection: Selection,
) -> Result<Engine<B>> {
    device.check_attention(files.config.head_dim, request.page_tokens)?;
    let lora = files.adapter().map(|adapter| adapter.lora().clone());
    let plan = Plan::new(&Request { training: None, lora, ..request.clone() }, machine)?;
    let mut engine = Engine::new(device, plan, selection)?;
    load_weights(&mut engine, files, 0)?;
    Ok(engine)
}

/// Host memory that a run may use, bytes: what is available now, under the control group's limit if there is one.
///
/// # Errors
/// If the system does not say.
pub fn host_memory() -> Result<u64> {
    let mut system = sysinfo::System::new().map_err(|e| Error::HostMemory(e.to_string()))?;
    system.refresh_memory();
    let available = system.available_memory();
    Ok(system.cgroup_limits().map_or(available, |limits| limits.free_memory.min(available)))
}

/// [`machine`] with this host's memory.
///
/// # Errors
/// As [`host_memory`].
pub fn this_machine<B: Backend>(device: &B) -> Result<Machine> {
    Ok(machine(device, host_memory()?))
}
