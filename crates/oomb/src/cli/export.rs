//! `oomb export`: a run's model as a Hugging Face folder.

use anyhow::{Context, Result, ensure};
use clap::{Args as ClapArgs, ValueEnum};
use oomb::checkpoint::{self, Checkpoint, Export, Values, WeightType};
use oomb::config::parse_bytes;
use oomb::model::params::{ParamSpec, param_specs};
use oomb::run_folder::MODEL_FOLDER;
use std::path::PathBuf;

/// Write the model of a finished run as a Hugging Face folder: config, safetensors, tokenizer files.
///
/// Weights are sharded with an index where they are large. The folder must be new.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb export --run runs/emma --out models/emma
  oomb export --run runs/emma --out models/emma-bf16 --dtype bf16")]
pub(crate) struct Args {
    /// Folder of a finished run
    #[arg(long)]
    run: PathBuf,
    /// Folder to make
    #[arg(long)]
    out: PathBuf,
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
    let folder = args.run.join(MODEL_FOLDER);
    ensure!(folder.is_dir(), "{} holds no finished model: there is no {}", args.run.display(), folder.display());
    let model = Checkpoint::open(&folder)?;
    let weights = match args.dtype {
        Some(Dtype::F32) => WeightType::F32,
        Some(Dtype::Bf16) => WeightType::Bf16,
        None => stored_type(&model)?,
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
