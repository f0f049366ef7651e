//! From a configuration to a run: the model, the data, the machine and the plan brought together, then the loop over
//! optimizer steps. It must not know terminals: what happens is told to an [`Observer`].

mod load;

use crate::config::{Config, GradDtype, Keep as KeepSetting, LrSchedule};
use crate::data::{Cursor, Order, Windows};
use crate::engine::{Engine, machine};
use crate::kv::select::Selection;
use crate::model::activations::Keep;
use crate::model::config::ModelConfig;
use crate::plan::{Machine, Plan, Request, Training};
use crate::train::{self, LossSum, StepLoss, Update};
pub use load::{Loading, ModelFiles, load_weights, save_weights};
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, DType};
use std::path::Path;
use std::time::{Duration, Instant};

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
    /// How much memory there is.
    #[error("cannot tell how much memory this machine has: {0}")]
    HostMemory(String),
    /// Datasets.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// Memory.
    #[error(transparent)]
    DoesNotFit(#[from] crate::plan::DoesNotFit),
    /// The device.
    #[error(transparent)]
    Device(#[from] oomb_device::Error),
    /// Loss or gradient are no longer numbers.
    #[error(
        "step {step}: the {what} is {value}; training stopped and no model was saved\nlower optimizer.lr, set optimizer.clip_norm, \
         or look at this step's data"
    )]
    NotFinite {
        /// `"loss"` or `"gradient norm"`.
        what: &'static str,
        /// Optimizer step, from 1.
        step: usize,
        /// What it was.
        value: f64,
    },
    /// The observer could not write down what happened.
    #[error(transparent)]
    Observer(#[from] std::io::Error),
}

/// Result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What one optimizer step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRecord {
    /// From 1.
    pub step: usize,
    /// Loss, gradient norm, tokens.
    pub loss: StepLoss,
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
}

/// Who is told what happens.
pub trait Observer {
    /// After an optimizer step; `validation` where it was due.
    ///
    /// # Errors
    /// Ends the run.
    fn step(&mut self, record: &StepRecord, validation: Option<LossSum>) -> std::io::Result<()>;
}

/// What the plan needs to know of a configuration and the model it names.
pub fn request(config: &Config, model: &ModelConfig) -> Request {
    let keep = match config.schedule.keep {
        KeepSetting::Auto => None,
        KeepSetting::Inputs => Some(Keep::Inputs),
        KeepSetting::Attention => Some(Keep::Attention),
        KeepSetting::All => Some(Keep::All),
    };
    Request {
        model: model.clone(),
        sequence_tokens: config.data.sequence_tokens,
        sequences_per_step: config.data.sequences_per_step,
        chunk_tokens: config.schedule.chunk_tokens,
        page_tokens: config.kv.page_tokens,
        group_pages: config.kv.group_pages.unwrap_or(DEFAULT_GROUP_PAGES),
        prefetch_groups: config.kv.prefetch_groups,
        loss_tile_tokens: config.schedule.loss_tile_tokens,
        device_budget: config.kv.device_budget_bytes,
        grad_dtype: match config.kv.grad_dtype {
            GradDtype::F32 => DType::F32,
            GradDtype::Bf16 => DType::Bf16,
        },
        training: Some(Training { keep, optimizer: true }),
    }
}

/// Pages that move together where the configuration does not say: 4 MiB of k, v at Qwen2.5-7B's shape, long enough for
/// the full rate of the link.
pub const DEFAULT_GROUP_PAGES: usize = 16;

/// Learning rate of `step` (from 1): linear warm-up over `warmup_steps`, then cosine or linear decay to `min_lr` at the
/// last step, or constant.
pub fn learning_rate(config: &Config, step: usize) -> f64 {
    let (optimizer, steps) = (&config.optimizer, config.run.steps);
    let (lr, min_lr, warmup) = (optimizer.lr, optimizer.min_lr, optimizer.warmup_steps);
    if step <= warmup {
        return lr * step as f64 / warmup as f64;
    }
    let progress = (step - warmup) as f64 / (steps.saturating_sub(warmup)).max(1) as f64;
    match optimizer.schedule {
        LrSchedule::Constant => lr,
        LrSchedule::Linear => lr + (min_lr - lr) * progress,
        LrSchedule::Cosine => min_lr + (lr - min_lr) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    }
}

/// How `step` changes the weights.
fn update_of(config: &Config, step: usize) -> Update {
    let optimizer = &config.optimizer;
    Update {
        hyper: AdamW {
            lr: learning_rate(config, step) as f32,
            beta1: optimizer.betas.0 as f32,
            beta2: optimizer.betas.1 as f32,
            eps: optimizer.eps as f32,
            weight_decay: optimizer.weight_decay as f32,
            step: u32::try_from(step).expect("steps fit 32 bits"),
        },
        clip_norm: optimizer.clip_norm.map(|norm| norm as f32),
        decay_norms_and_biases: optimizer.decay_norms_and_biases,
    }
}

/// A run that is ready to start: everything was read, checked, planned and allocated.
pub struct Run<B: Backend> {
    config: Config,
    files: ModelFiles,
    engine: Engine<B>,
    order: Order,
    train: Windows,
    validation: Option<Windows>,
}

impl<B: Backend> Run<B> {
    /// Plans, allocates, and loads or makes the weights.
    ///
    /// # Errors
    /// If the data does not suit the model, the plan does not fit `machine`, or the device fails.
    pub fn new(
        device: &B,
        machine: &Machine,
        config: Config,
        files: ModelFiles,
        data: (Windows, Option<Windows>),
    ) -> Result<Self> {
        let (train, validation) = data;
        for windows in std::iter::once(&train).chain(&validation) {
            windows.dataset().check_vocabulary(files.config.vocab_size)?;
        }
        device.check_attention(files.config.head_dim, config.kv.page_tokens)?;
        let plan = Plan::new(&request(&config, &files.config), machine)?;
        let mut engine = Engine::new(device, plan, config.kv.selection)?;
        load_weights(&mut engine, &files, config.run.seed)?;
        train::start_optimizer(&mut engine);
        let order = Order::new(train.len(), config.run.seed, Cursor::default());
        Ok(Self { config, files, engine, order, train, validation })
    }

    /// What was allocated.
    pub fn plan(&self) -> &Plan {
        &self.engine.plan
    }

    /// Writes the model as it is now as a Hugging Face folder, with the tokenizer of its checkpoint, or else of the data.
    ///
    /// # Errors
    /// If the folder exists and is not empty, the disk refuses, or the device fails.
    pub fn save(&self, out: &Path) -> Result<()> {
        let mut tokenizer = self.files.tokenizer_files();
        if tokenizer.is_empty() {
            tokenizer.extend(self.train.dataset().tokenizer_file());
        }
        save_weights(&self.engine, &self.files, &tokenizer, out)
    }

    /// All steps.
    ///
    /// # Errors
    /// If data cannot be read, the device fails, or numbers stop being finite; the weights are then those of the last
    /// good step.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<()> {
        for step in 1..=self.config.run.steps {
            let started = Instant::now();
            let loss = self.step(step)?;
            let record = StepRecord {
                step,
                loss,
                lr: learning_rate(&self.config, step),
                elapsed: started.elapsed(),
                epochs: self.order.epochs(),
                device_bytes: self.engine.device.device_bytes() + self.engine.device.workspace_bytes(),
                host_bytes: self.engine.device.pinned_bytes(),
            };
            let due = step.is_multiple_of(self.config.run.validate_every.max(1)) || step == self.config.run.steps;
            let validation = if due { self.validate()? } else { None };
            observer.step(&record, validation)?;
        }
        Ok(())
    }

    fn step(&mut self, step: usize) -> Result<StepLoss> {
        let windows = (0..self.config.data.sequences_per_step).map(|_| self.order.next_window());
        let sequences = windows.map(|window| self.train.get(window)).collect::<std::result::Result<Vec<_>, _>>()?;
        let seed = self.config.run.seed.wrapping_add((step as u64) << 32);
        let loss = train::gradient(&mut self.engine, &sequences, seed)?;
        for (what, value) in [("loss", loss.loss), ("gradient norm", loss.grad_norm)] {
            if !value.is_finite() {
                return Err(Error::NotFinite { what, step, value });
            }
        }
        train::update(&mut self.engine, &update_of(&self.config, step));
        self.engine.device.synchronize()?;
        Ok(loss)
    }

    fn validate(&mut self) -> Result<Option<LossSum>> {
        let Some(windows) = &self.validation else { return Ok(None) };
        evaluate(&mut self.engine, windows, self.config.run.validation_sequences, &mut |_, _| {}).map(Some)
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

/// An engine that only evaluates, with the weights of `files`.
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
    let plan = Plan::new(&Request { training: None, ..request.clone() }, machine)?;
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
