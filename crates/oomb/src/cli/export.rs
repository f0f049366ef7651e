//! `oomb export`: a run's model, or a model with an adapter merged into it, as a Hugging Face folder.

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args as ClapArgs, ValueEnum};
use oomb::checkpoint::{self, Export, WeightType};
use oomb::config::{Config, ModelSettings, ModelSource, parse_bytes};
use oomb::model::params::ParamSpec;
use oomb::run::ModelFiles;
use oomb::run_folder::{ADAPTER_FOLDER, CONFIG_FILE, MODEL_FOLDER};
use oomb::state::{Checkpoint, Checkpoints};
use std::path::{Path, PathBuf};

/// Write the model of a run as a Hugging Face folder: config, safetensors, tokenizer files.
///
/// Of a run that is not finished, the newest intact checkpoint is taken. A run with [lora] has an adapter instead, in PEFT's
/// form already; with --merge it is written into the weights of the model it was trained on. Weights are sharded with an index
/// where they are large. The folder must be new.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb export --run runs/emma --out models/emma
  oomb export --run runs/emma --out models/emma-bf16 --dtype bf16
  oomb export --run runs/emma --out models/emma-best --checkpoint best
  oomb export --run runs/emma --out models/emma-100 --checkpoint step-100
  oomb export --run runs/tuned --merge --out models/tuned
  oomb export --model models/smollm2-135m --adapter runs/tuned/adapter --out models/tuned")]
#[command(group = ArgGroup::new("what").required(true).args(["run", "model"]))]
pub(crate) struct Args {
    /// Folder of the run
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
    /// A checkpoint instead of what the finished run saved: best (by validation loss) or step-N
    #[arg(long, value_name = "best|step-N", requires = "run")]
    checkpoint: Option<String>,
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
    let (model, own_type) = match (&args.run, &args.model, &args.adapter) {
        (Some(run), ..) => of_run(run, args)?,
        (None, Some(model), Some(adapter)) => (open(model)?.with_adapter(adapter)?, None),
        _ => bail!("name a run, or a model and an adapter"),
    };
    let weights = match (args.dtype, own_type) {
        (Some(Dtype::F32), _) => WeightType::F32,
        (Some(Dtype::Bf16), _) => WeightType::Bf16,
        (None, Some(own_type)) => own_type,
        (None, None) => model.weight_type()?,
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

/// What a run trained, with the adapter merged where it is one; and the type in which the run computes, where its checkpoint has
/// another.
fn of_run(run: &Path, args: &Args) -> Result<(ModelFiles, Option<WeightType>)> {
    let (folder, checkpoint) = source(run, args)?;
    let is_adapter = folder.ends_with(ADAPTER_FOLDER);
    match (is_adapter, args.merge) {
        (false, false) => {
            let bf16 = |checkpoint: &Checkpoint| checkpoint.saved.compute_dtype == "bf16";
            let own_type = checkpoint.as_ref().map(|it| if bf16(it) { WeightType::Bf16 } else { WeightType::F32 });
            Ok((open(&folder)?, own_type))
        }
        (false, true) => bail!("{} holds a model, not an adapter: leave --merge out", run.display()),
        (true, false) => bail!(
            "{} holds an adapter, not a model: add --merge to write it into the weights of its model, or take {} as it is, in PEFT's \
             form",
            run.display(),
            folder.display()
        ),
        (true, true) => {
            let config = match checkpoint {
                Some(checkpoint) => checkpoint.config,
                None => Config::load(&run.join(CONFIG_FILE), &[])?,
            };
            let base = ModelFiles::open(&config.model).with_context(|| {
                format!(
                    "cannot open the model that {} was trained on; if it has moved, give --model and --adapter",
                    run.display()
                )
            })?;
            Ok((base.with_adapter(&folder)?, None))
        }
    }
}

/// The folder of the model or the adapter to export, and the checkpoint that it is part of.
fn source(run: &Path, args: &Args) -> Result<(PathBuf, Option<Checkpoint>)> {
    let (finished, checkpoints) = ([MODEL_FOLDER, ADAPTER_FOLDER].map(|name| run.join(name)), Checkpoints::of(run));
    let checkpoint = match (&args.checkpoint, finished.into_iter().find(|folder| folder.is_dir())) {
        (Some(name), _) => checkpoints.named(name)?,
        (None, Some(folder)) => return Ok((folder, None)),
        (None, None) => {
            let newest = checkpoints.newest()?;
            for damaged in newest.damaged {
                eprintln!("note: {damaged}; it is not used");
            }
            let missing = || format!("{} holds neither a finished model nor a checkpoint", run.display());
            newest.checkpoint.with_context(missing)?
        }
    };
    eprintln!("note: exporting checkpoint {}", checkpoint.name());
    let folder = if checkpoint.config.lora.is_some() { checkpoint.adapter() } else { checkpoint.weights() };
    Ok((folder, Some(checkpoint)))
}

/// A parameter's values: its tensors, one after the other.
fn parameter(model: &ModelFiles, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(spec.len());
    for (name, _) in &spec.sources {
        values.extend(model.tensor(name)?.to_f32());
    }
    Ok(values)
}
