//! `oomb export`: a run's model as a Hugging Face folder.

use anyhow::{Context, Result};
use clap::{Args as ClapArgs, ValueEnum};
use oomb::checkpoint::{self, Checkpoint, Export, Values, WeightType};
use oomb::config::parse_bytes;
use oomb::model::params::{ParamSpec, param_specs};
use oomb::run_folder::MODEL_FOLDER;
use oomb::state::Checkpoints;
use std::path::PathBuf;

/// Write the model of a run as a Hugging Face folder: config, safetensors, tokenizer files.
///
/// Of a run that is not finished, the newest intact checkpoint is taken. Weights are sharded with an index where they are
/// large. The folder must be new.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb export --run runs/emma --out models/emma
  oomb export --run runs/emma --out models/emma-bf16 --dtype bf16
  oomb export --run runs/emma --out models/emma-best --checkpoint best
  oomb export --run runs/emma --out models/emma-100 --checkpoint step-100")]
pub(crate) struct Args {
    /// Folder of the run
    #[arg(long)]
    run: PathBuf,
    /// Folder to make
    #[arg(long)]
    out: PathBuf,
    /// A checkpoint instead of the finished model: best (by validation loss) or step-N
    #[arg(long, value_name = "best|step-N")]
    checkpoint: Option<String>,
    /// Type of the weights; as the run has them where nothing is said
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// No weight file is larger, unless a single tensor is
    #[arg(long, value_parser = shard_bytes, default_value = "5GB")]
    max_shard_bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    /// 32-bit floats
    F32,
    /// bfloat16, rounded to nearest
    Bf16,
}

fn shard_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).filter(|&bytes| bytes > 0);
    bytes.ok_or_else(|| format!("wanted bytes above 0, such as 5GB, got {text:?}"))
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (folder, own_type) = source(args)?;
    let model = Checkpoint::open(&folder)?;
    let weights = match (args.dtype, own_type) {
        (Some(Dtype::F32), _) => WeightType::F32,
        (Some(Dtype::Bf16), _) => WeightType::Bf16,
        (None, Some(own_type)) => own_type,
        (None, None) => stored_type(&model)?,
    };
    let files = checkpoint::tokenizer_files(&folder);
    let export = Export {
        config: model.config(),
        config_json: Some(model.config_json()),
        files: &files,
        weights,
        max_shard_bytes: args.max_shard_bytes,
    };
    checkpoint::write(&args.out, &export, |spec| parameter(&model, spec))?;
    println!("{}", args.out.display());
    Ok(())
}

/// The folder of the weights to export and, where they are a checkpoint's, the type in which its run computes.
fn source(args: &Args) -> Result<(PathBuf, Option<WeightType>)> {
    let (model, checkpoints) = (args.run.join(MODEL_FOLDER), Checkpoints::of(&args.run));
    let checkpoint = match &args.checkpoint {
        Some(name) => checkpoints.named(name)?,
        None if model.is_dir() => return Ok((model, None)),
        None => {
            let newest = checkpoints.newest()?;
            for damaged in newest.damaged {
                eprintln!("note: {damaged}; it is not used");
            }
            let missing = || format!("{} holds neither a finished model nor a checkpoint", args.run.display());
            newest.checkpoint.with_context(missing)?
        }
    };
    eprintln!("note: exporting checkpoint {}", checkpoint.name());
    let own_type = if checkpoint.saved.compute_dtype == "bf16" { WeightType::Bf16 } else { WeightType::F32 };
    Ok((checkpoint.weights(), Some(own_type)))
}

/// The type in which the run saved its weights.
fn stored_type(model: &Checkpoint) -> Result<WeightType> {
    let first = param_specs(model.config()).swap_remove(0);
    let (name, _) = first.sources.first().context("every parameter has a source")?;
    Ok(match model.tensor(name)? {
        Values::F32(_) => WeightType::F32,
        Values::Bf16(_) | Values::F16(_) => WeightType::Bf16,
    })
}

/// A parameter's values: its tensors, one after the other.
fn parameter(model: &Checkpoint, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(spec.len());
    for (name, _) in &spec.sources {
        values.extend(model.tensor(name)?.to_f32());
    }
    Ok(values)
}
