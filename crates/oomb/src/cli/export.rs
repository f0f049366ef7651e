//! `oomb export`: a run's model, or a model with an adapter merged into it, as a Hugging Face folder.

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgGroup, Args as ClapArgs, ValueEnum};
use oomb::checkpoint::{self, Export, WeightType};
use oomb::config::{Config, ModelSettings, ModelSource, parse_bytes};
use oomb::model::params::ParamSpec;
use oomb::run::ModelFiles;
use oomb::run_folder::{ADAPTER_FOLDER, CONFIG_FILE, MODEL_FOLDER};
use std::path::{Path, PathBuf};

/// Write the model of a finished run as a Hugging Face folder: config, safetensors, tokenizer files.
///
/// A run with [lora] has an adapter instead, in PEFT's form, in its folder already; with --merge it is written into the weights
/// of the model it was trained on. Weights are sharded with an index where they are large. The folder must be new.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb export --run runs/emma --out models/emma
  oomb export --run runs/emma --out models/emma-bf16 --dtype bf16
  oomb export --run runs/tuned --merge --out models/tuned
  oomb export --model models/smollm2-135m --adapter runs/tuned/adapter --out models/tuned")]
#[command(group = ArgGroup::new("what").required(true).args(["run", "model"]))]
pub(crate) struct Args {
    /// Folder of a finished run
    #[arg(long)]
    run: Option<PathBuf>,
    /// Write the run's adapter into the weights of the model it was trained on
    #[arg(long, requires = "run")]
    merge: bool,
    /// Folder of a Hugging Face checkpoint to write an adapter into
    #[arg(long, requires = "adapter", conflicts_with = "run")]
    model: Option<PathBuf>,
    /// Folder of the PEFT adapter
    #[arg(long, requires = "model")]
    adapter: Option<PathBuf>,
    /// Folder to make
    #[arg(long)]
    out: PathBuf,
    /// Type of the weights; as the run or the model has them where nothing is said
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
    let model = match (&args.run, &args.model, &args.adapter) {
        (Some(run), ..) if args.merge => merged_run(run)?,
        (Some(run), ..) => finished_run(run)?,
        (None, Some(model), Some(adapter)) => open(model)?.with_adapter(adapter)?,
        _ => bail!("name a run, or a model and an adapter"),
    };
    let weights = match args.dtype {
        Some(Dtype::F32) => WeightType::F32,
        Some(Dtype::Bf16) => WeightType::Bf16,
        None => model.weight_type()?,
    };
    let export = Export {
        config: &model.config,
        config_json: model.config_json(),
        files: &model.tokenizer_files(),
        weights,
        max_shard_bytes: args.max_shard_bytes,
    };
    checkpoint::write(&args.out, &export, |spec| parameter(&model, spec))?;
    println!("{}", args.out.display());
    Ok(())
}

fn open(folder: &Path) -> Result<ModelFiles> {
    Ok(ModelFiles::open(&ModelSettings { source: ModelSource::Path(folder.to_owned()), rope_scaling: None })?)
}

/// The model that a run saved.
fn finished_run(run: &Path) -> Result<ModelFiles> {
    let (model, adapter) = (run.join(MODEL_FOLDER), run.join(ADAPTER_FOLDER));
    ensure!(
        model.is_dir() || !adapter.is_dir(),
        "{} holds an adapter, not a model: add --merge to write it into the weights of its model, or take {} as it is, in PEFT's \
         form",
        run.display(),
        adapter.display()
    );
    ensure!(model.is_dir(), "{} holds no finished model: there is no {}", run.display(), model.display());
    open(&model)
}

/// The model that a run was trained on, with the adapter that the run saved.
fn merged_run(run: &Path) -> Result<ModelFiles> {
    let adapter = run.join(ADAPTER_FOLDER);
    ensure!(adapter.is_dir(), "{} holds no finished adapter: there is no {}", run.display(), adapter.display());
    let config = Config::load(&run.join(CONFIG_FILE), &[])?;
    let base = ModelFiles::open(&config.model).with_context(|| {
        format!("cannot open the model that {} was trained on; if it has moved, give --model and --adapter", run.display())
    })?;
    Ok(base.with_adapter(&adapter)?)
}

/// A parameter's values: its tensors, one after the other.
fn parameter(model: &ModelFiles, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(spec.len());
    for (name, _) in &spec.sources {
        values.extend(model.tensor(name)?.to_f32());
    }
    Ok(values)
}
