//! The configuration file: its settings with their units, defaults and reasons, and the checks between them. It must not
//! know what a setting does: it turns text into values that are complete and consistent, or says what is wrong.
//!
//! Paths are relative to the folder in which `oomb` is started.

mod check;
mod choices;
mod data;
mod error;
mod lora;
mod read;
mod size;
mod write;

pub use choices::{
    ComputeDtype, DataFormat, DeviceChoice, GradDtype, Keep, LongDocuments, LossOn, LrSchedule, Malformed, ModelSource,
    OnNotFinite, OptimizerName, Packing, Placement, Selection, StateDtype, TokenizerSource,
};
pub use data::{DataSettings, RowSettings, SourceSettings};
pub use error::{Error, Result};
pub use lora::{LoraSettings, LoraSource};
pub use read::nearest;
pub use size::{Bytes, format_count, parse_bytes, parse_tokens};

use read::{Document, NumBytes, OrAuto, Section, Tokens};
use std::path::{Path, PathBuf};

/// All settings of a run, complete and consistent.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `[model]`
    pub model: ModelSettings,
    /// `[lora]`; absent where all weights are trained.
    pub lora: Option<LoraSettings>,
    /// `[data]`
    pub data: DataSettings,
    /// `[schedule]`
    pub schedule: ScheduleSettings,
    /// `[kv]`
    pub kv: KvSettings,
    /// `[optimizer]`
    pub optimizer: OptimizerSettings,
    /// `[run]`
    pub run: RunSettings,
}

/// `[model]`: which weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSettings {
    /// `preset = "tiny"` (a built-in shape with random weights drawn from `run.seed`) or `path = "folder"` (a Hugging Face
    /// checkpoint). Exactly one; no default, because nothing else says what to train.
    pub source: ModelSource,
    /// `rope_scaling = { rope_type = "yarn", factor = 4.0, … }`: replaces the checkpoint's own, in Hugging Face form.
    /// Default: the checkpoint's. For contexts longer than the model was trained on.
    pub rope_scaling: Option<serde_json::Map<String, serde_json::Value>>,
}

/// [`ScheduleSettings::chunk_tokens`] where nothing is said, or nothing can be predicted.
pub const DEFAULT_CHUNK_TOKENS: usize = 8192;

/// `[schedule]`: how a sequence is cut and what is kept of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduleSettings {
    /// T, in tokens, a multiple of `kv.page_tokens`. Default 8192: large enough to keep a GPU busy and to hide page
    /// transfers, small enough that one chunk's activations are a few GiB. `auto` (`None`): what is predicted to be fastest.
    pub chunk_tokens: Option<usize>,
    /// What pass 2 keeps of a chunk's forward for its own backward. Default `auto`: as much as fits.
    pub keep: Keep,
    /// Device bytes for activations of more chunks than the one in work, so that pass 2 need not compute them again. Default
    /// `auto` (`None`): what a GPU has left; nothing on the CPU, whose memory is everyone's.
    pub keep_budget_bytes: Option<u64>,
    /// The same of page-locked host memory, for attention's outputs and layer inputs. Default `auto` (`None`): what the host of a
    /// GPU has left, but a tenth; nothing on the CPU.
    pub keep_host_budget_bytes: Option<u64>,
    /// Tokens per tile of head and loss. Default `auto` (`None`): chosen by the plan, so that a tile of logits stays small.
    pub loss_tile_tokens: Option<usize>,
}

/// `[kv]`: the page store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvSettings {
    /// P, in tokens. Default 128: a tile of the attention kernels.
    pub page_tokens: usize,
    /// Which pages a query attends to. Default `all`: exact dense attention.
    pub selection: Selection,
    /// How gradients of pages are stored. Default `f32`; `bf16` halves them, with stochastic rounding.
    pub grad_dtype: GradDtype,
    /// Device bytes for pages and their gradients; the rest is in host memory. Default `auto` (`None`): what the device has
    /// left.
    pub device_budget_bytes: Option<u64>,
    /// Consecutive pages that move together, at most 64. Default `auto` (`None`): 16, long enough for the link's full rate.
    pub group_pages: Option<usize>,
    /// Groups fetched ahead of the one in use. Default 2: one arriving while one waits. 0 fetches on demand.
    pub prefetch_groups: usize,
}

/// `[optimizer]`
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerSettings {
    /// `"adamw"`, the only one.
    pub name: OptimizerName,
    /// Peak learning rate per step. Default 3e-4.
    pub lr: f64,
    /// Decay of the two moments, each in `0 ..< 1`. Default `[0.9, 0.95]`, customary for language models.
    pub betas: (f64, f64),
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: f64,
    /// Decoupled decay per unit of learning rate. Default 0.1, customary for language models.
    pub weight_decay: f64,
    /// Default `false`: norms and biases are not decayed, decay would pull them to 0.
    pub decay_norms_and_biases: bool,
    /// Largest global norm of the gradient; `"off"` (`None`) does not clip. Default 1.0.
    pub clip_norm: Option<f64>,
    /// Course of the learning rate from the end of warm-up down to `min_lr` after the last step. Default `cosine`.
    pub schedule: LrSchedule,
    /// Steps over which the rate rises linearly from 0, at most `run.steps`. Default 0.
    pub warmup_steps: usize,
    /// Learning rate after the last step, at most `lr`: with the default 0 every step still has a rate above 0, as in
    /// transformers. Of no meaning, and refused, with `schedule = "constant"`.
    pub min_lr: f64,
    /// How the moments are stored. Default `auto`: the most exact that fits.
    pub state_dtype: StateDtype,
    /// Whether bf16 weights have f32 masters; without, the weights themselves are updated with stochastic rounding. Default
    /// `auto` (`None`): as long as they fit.
    pub master_weights: Option<bool>,
    /// Where moments and masters live. Default `auto`: on the device where they fit there.
    pub placement: Placement,
}

/// `[run]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunSettings {
    /// The run's folder; must not exist or be empty, unless its run is resumed. No default: nothing is written where it
    /// was not asked for.
    pub out: PathBuf,
    /// Optimizer steps, at least 1. No default.
    pub steps: usize,
    /// Seed of weights, order of the data and stochastic rounding. Default 0.
    pub seed: u64,
    /// `"auto"` (a GPU if there is one), `"cpu"`, `"cuda:0"`. Default `auto`.
    pub device: DeviceChoice,
    /// How weights, activations and pages are stored. Default `auto`: bf16 on a GPU, f32 on the CPU. `bf16` on the CPU
    /// rounds wherever a GPU would, in f32 storage.
    pub compute_dtype: ComputeDtype,
    /// CPU threads. Default `auto` (`None`): all cores.
    pub threads: Option<usize>,
    /// Steps between two lines of progress where output is piped; `metrics.jsonl` has every step. Default 1.
    pub log_every: usize,
    /// Steps between two validation losses. Default 100 where there is validation data; refused where there is none.
    pub validate_every: usize,
    /// Whether scalars are also written for TensorBoard, in the run's folder. Default `false`: `metrics.jsonl` and the report
    /// have them all.
    pub tensorboard: bool,
    /// Sequences per validation, from the start of the validation data. Default 8; refused without validation data.
    pub validation_sequences: usize,
    /// Steps between two checkpoints; one more is written at the last step, and when the run is interrupted. Default 100:
    /// little work is lost, little time is spent writing. `"off"` (`None`): only when the run is interrupted.
    pub checkpoint_every: Option<usize>,
    /// Newest checkpoints that stay, the one with the best validation loss beside them. Default 2: if the newest is
    /// damaged, there is another.
    pub keep_checkpoints: usize,
    /// What is done when loss or gradient are not finite. Default `stop`; `skip` leaves that step's update out.
    pub on_not_finite: OnNotFinite,
}

impl Config {
    /// Reads a configuration file and applies the overrides (`section.key=value`).
    ///
    /// # Errors
    /// Whatever is wrong with either: the file, the key, what was wanted and what was there.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
        Self::parse(&text, &path.display().to_string(), overrides)
    }

    /// The same from text; `origin` names it in errors.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Self> {
        let document = Document::parse(text, origin, overrides)?;
        let data = data::read(&document)?;
        let config = Self {
            model: read_model(&document)?,
            lora: lora::read(&document)?,
            schedule: read_schedule(&document.section("schedule"))?,
            kv: read_kv(&document.section("kv"))?,
            optimizer: read_optimizer(&document)?,
            run: read_run(&document, data.validation.is_some())?,
            data,
        };
        config.check(&document)?;
        Ok(config)
    }
}

fn read_model(document: &Document) -> Result<ModelSettings> {
    let section = document.section("model");
    let (preset, path) = (section.optional::<String>("preset")?, section.optional::<PathBuf>("path")?);
    let source = match (preset, path) {
        (Some(preset), None) => ModelSource::Preset(preset),
        (None, Some(path)) => ModelSource::Path(path),
        (None, None) => {
            return Err(document.invalid("model", "needs either preset = \"tiny\" or path = \"folder of a checkpoint\""));
        }
        (Some(_), Some(_)) => return Err(document.invalid("model", "has both preset and path: remove one")),
    };
    let rope_scaling = match section.optional::<toml::Table>("rope_scaling")? {
        Some(table) => match serde_json::to_value(table) {
            // TOML has no null: it stands for nan or inf.
            Ok(serde_json::Value::Object(map)) if !map.values().any(holds_null) => Some(map),
            _ => return Err(document.invalid("model.rope_scaling", "holds a value that JSON does not have")),
        },
        None => None,
    };
    Ok(ModelSettings { source, rope_scaling })
}

fn holds_null(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => true,
        serde_json::Value::Array(items) => items.iter().any(holds_null),
        serde_json::Value::Object(map) => map.values().any(holds_null),
        _ => false,
    }
}

fn read_schedule(section: &Section<'_>) -> Result<ScheduleSettings> {
    Ok(ScheduleSettings {
        chunk_tokens: section.or("chunk_tokens", OrAuto(Some(Tokens(DEFAULT_CHUNK_TOKENS))))?.0.map(|tokens| tokens.0),
        keep: section.or("keep", Keep::Auto)?,
        keep_budget_bytes: section.or("keep_budget", OrAuto::<NumBytes>(None))?.0.map(|bytes| bytes.0),
        keep_host_budget_bytes: section.or("keep_host_budget", OrAuto::<NumBytes>(None))?.0.map(|bytes| bytes.0),
        loss_tile_tokens: section.or("loss_tile_tokens", OrAuto::<Tokens>(None))?.0.map(|tokens| tokens.0),
    })
}

fn read_kv(section: &Section<'_>) -> Result<KvSettings> {
    Ok(KvSettings {
        page_tokens: section.or("page_tokens", Tokens(128))?.0,
        selection: section.or("selection", Selection::All)?,
        grad_dtype: section.or("grad_dtype", GradDtype::F32)?,
        device_budget_bytes: section.or("device_budget", OrAuto::<NumBytes>(None))?.0.map(|bytes| bytes.0),
        group_pages: section.or("group_pages", OrAuto::<usize>(None))?.0,
        prefetch_groups: section.or("prefetch_groups", 2)?,
    })
}

fn read_optimizer(document: &Document) -> Result<OptimizerSettings> {
    let section = document.section("optimizer");
    let schedule = section.or("schedule", LrSchedule::Cosine)?;
    let min_lr = section.optional::<f64>("min_lr")?;
    if schedule == LrSchedule::Constant && min_lr.is_some() {
        return Err(document.invalid("optimizer.min_lr", "has no effect with schedule = \"constant\": remove one"));
    }
    Ok(OptimizerSettings {
        name: section.or("name", OptimizerName::AdamW)?,
        lr: section.or("lr", 3e-4)?,
        betas: section.or("betas", (0.9, 0.95))?,
        eps: section.or("eps", 1e-8)?,
        weight_decay: section.or("weight_decay", 0.1)?,
        decay_norms_and_biases: section.or("decay_norms_and_biases", false)?,
        clip_norm: section.or("clip_norm", choices::ClipNorm(Some(1.0)))?.0,
        schedule,
        warmup_steps: section.or("warmup_steps", 0)?,
        min_lr: min_lr.unwrap_or(0.0),
        state_dtype: section.or("state_dtype", StateDtype::Auto)?,
        master_weights: section.or("master_weights", choices::MasterWeights(None))?.0,
        placement: section.or("placement", Placement::Auto)?,
    })
}

fn read_run(document: &Document, validates: bool) -> Result<RunSettings> {
    let section = document.section("run");
    let validate_every = section.optional("validate_every")?;
    let validation_sequences = section.optional("validation_sequences")?;
    for (key, given) in [("validate_every", validate_every), ("validation_sequences", validation_sequences)] {
        if given.is_some() && !validates {
            let problem = "is set, but there is no validation data: set data.validation or remove it";
            return Err(document.invalid(&format!("run.{key}"), problem));
        }
    }
    Ok(RunSettings {
        out: section.required("out", "name the run's folder, for example out = \"runs/first\"")?,
        steps: section.required("steps", "for example steps = 100")?,
        seed: section.or("seed", 0)?,
        device: section.or("device", DeviceChoice::Auto)?,
        compute_dtype: section.or("compute_dtype", ComputeDtype::Auto)?,
        threads: section.or("threads", OrAuto::<usize>(None))?.0,
        log_every: section.or("log_every", 1)?,
        tensorboard: section.or("tensorboard", false)?,
        validate_every: validate_every.unwrap_or(100),
        validation_sequences: validation_sequences.unwrap_or(8),
        checkpoint_every: section.or("checkpoint_every", choices::Every(Some(100)))?.0,
        keep_checkpoints: section.or("keep_checkpoints", 2)?,
        on_not_finite: section.or("on_not_finite", OnNotFinite::Stop)?,
    })
}
