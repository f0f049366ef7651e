//! `oomb plan`: every buffer of a run, and whether they fit.

use super::machine::{on_device, open_device};
use super::settings::Settings;
use anyhow::Result;
use clap::{Args as ClapArgs, ValueEnum};
use oomb::config::{Config, format_count, parse_bytes};
use oomb::kv::select::Selection;
use oomb::plan::{Machine, Plan};
use oomb::rates;
use oomb::run::{self, Lora, ModelFiles};
use oomb_device::cuda::WORKSPACE_BYTES;
use oomb_device::{DType, Device};
use std::path::{Path, PathBuf};

/// Say what a run allocates, buffer by buffer, and whether it fits; nothing is allocated and no GPU is needed.
///
/// Without --device-memory the plan is for this machine. What does not fit ends with the sum, and the settings that would
/// make it fit.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb plan --config configs/emma.toml
  oomb plan --model qwen2.5-7b --sequence-tokens 1M --device-memory 139GiB --host-memory 125GiB --optimizer none
  oomb plan --model qwen2.5-7b --sequence-tokens 128K --device-memory 79GiB --host-memory 125GiB --set lora.rank=16
  oomb plan --model models/my-checkpoint --sequence-tokens 256K --set kv.grad_dtype=bf16 --set schedule.chunk_tokens=4096")]
#[command(group = clap::ArgGroup::new("what").required(true).args(["config", "model"]))]
pub(crate) struct Args {
    /// Plan the run of this configuration file
    #[arg(long)]
    config: Option<PathBuf>,
    /// Plan for a built-in shape, or the folder of a Hugging Face checkpoint
    #[arg(long, requires = "sequence_tokens")]
    model: Option<String>,
    /// Context length: 32768, 64K, 1M
    #[arg(long, conflicts_with = "config")]
    sequence_tokens: Option<String>,
    /// Override a setting, as often as needed: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Plan for a GPU with this much free memory instead of this machine
    #[arg(long, value_parser = bytes, requires = "host_memory")]
    device_memory: Option<u64>,
    /// Host memory that may be used beside that GPU
    #[arg(long, value_parser = bytes, requires = "device_memory")]
    host_memory: Option<u64>,
    /// Whether the optimizer's state is part of the plan
    #[arg(long, value_enum, default_value_t = Optimizer::Adamw)]
    optimizer: Optimizer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Optimizer {
    /// Forward and backward only
    None,
    /// As the settings say, or as fits: see optimizer.state_dtype, master_weights and placement
    Adamw,
}

fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("wanted bytes such as 64MiB or 125GiB, got {text:?}"))
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let config = configuration(args)?;
    let (machine, hardware) = match (args.device_memory, args.host_memory) {
        (Some(device_memory), Some(host_memory)) => (gpu(device_memory, host_memory), ASSUMED.to_owned()),
        _ => {
            let opened = open_device(config.run.device, config.run.compute_dtype)?;
            on_device!(opened, |device| (run::this_machine(&device)?, device.hardware()))
        }
    };
    let files = ModelFiles::open(&config.model)?;
    let mut request = run::request(&config, &files.config);
    if let Some(settings) = &config.lora {
        request.lora = Some(Lora::open(settings, &files.config)?.config().clone());
    }
    if let Some(training) = &mut request.training {
        training.optimizer = args.optimizer == Optimizer::Adamw;
    }
    match run::plan(&config, &request, &machine, &hardware) {
        Ok(plan) => print!("{plan}{}", prediction(&plan, config.kv.selection, &hardware)?),
        Err(error) => {
            if let run::Error::DoesNotFit(refusal) = &error {
                print!("{}", refusal.smallest);
            }
            return Err(error.into());
        }
    }
    println!("it fits");
    Ok(())
}

/// How long a step takes, as far as anything is known of the hardware.
pub(super) fn prediction(plan: &Plan, selection: Selection, hardware: &str) -> Result<String> {
    let Some((rates, origin)) = rates::of(hardware)? else {
        return Ok(format!("time      not known on {hardware}: oomb bench rates measures what it takes to say\n"));
    };
    let time = plan.predict(&rates, selection);
    let rate = format_count((plan.step_tokens() as f64 / time.total()).round() as u64);
    Ok(format!("time      {time}; {rate} tokens/s ({origin})\n"))
}

/// What a GPU that is not here is taken for.
const ASSUMED: &str = "NVIDIA H200";

/// The configuration file, or one made of `--model` and `--sequence-tokens`; overrides apply to both.
fn configuration(args: &Args) -> Result<Config> {
    let Some(model) = &args.model else {
        let path = args.config.as_deref().unwrap_or(Path::new(""));
        return Ok(Config::load(path, &args.set)?);
    };
    let sequence_tokens = args.sequence_tokens.as_deref().unwrap_or_default();
    let settings = Settings { command: "oomb plan", model, data: "none", sequence_tokens, tokenizer: None, set: &args.set };
    settings.config()
}

/// A GPU as a plan sees it: bf16, with memory of its own.
fn gpu(device_memory: u64, host_memory: u64) -> Machine {
    Machine {
        device: "a GPU".to_owned(),
        compute_dtype: DType::Bf16,
        element_bytes: [2, 4, 8, 4],
        device_memory,
        host_memory,
        shared: false,
        workspace_bytes: WORKSPACE_BYTES,
    }
}
