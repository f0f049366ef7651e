//! `oomb train`: a configuration to a trained model.

mod recorder;

use super::data_report::data_report;
use super::interrupt::{Interrupted, Interrupts};
use super::machine::{cutting, on_device, open_data, open_device, open_model, use_threads};
use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use oomb::config::{Bytes, Config, DataSettings, RowSettings, RunSettings, format_count};
use oomb::data::{Source, Sources, Windows};
use oomb::metrics::METRICS_FILE;
use oomb::model::config::ModelConfig;
use oomb::plan::{Plan, Tier};
use oomb::report;
use oomb::run::{self, Ended, Lora, Run};
use oomb::run_folder;
use oomb::state::{self, Beginning};
use oomb_device::{Backend, DType};
use recorder::Recorder;
use std::path::{Path, PathBuf};

/// Train a model as a configuration file says.
///
/// Everything is checked before any work: keys, files, vocabulary, memory, disk. The run's folder must be new; it gets the
/// resolved configuration, metrics.jsonl with a line per step, checkpoints, and the trained model, or with [lora] the trained
/// adapter.
///
/// A run that was killed or interrupted goes on with --resume as if nothing had happened. SIGINT (Ctrl-C) and SIGTERM
/// finish the step, save a checkpoint and end the run; a second one ends it at once.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb train --config configs/emma.toml
  oomb train --config configs/emma.toml --set run.out=runs/second --set optimizer.lr=1e-3
  oomb train --config my.toml --set lora.rank=16        # an adapter; the model's weights stay as they are
  oomb train --config configs/emma.toml --resume")]
pub(crate) struct Args {
    /// TOML file; every key is checked
    #[arg(long)]
    config: PathBuf,
    /// Override a setting, as often as needed: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Go on from the newest intact checkpoint in run.out; begin where there is none. Settings that change what is trained
    /// must be as they were
    #[arg(long)]
    resume: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let config = Config::load(&args.config, &args.set)?;
    // Before looking at what is there: another process may be changing it.
    let there = args.resume && config.run.out.join(run_folder::CONFIG_FILE).exists();
    let _lock = there.then(|| run_folder::lock(&config.run.out)).transpose()?;
    let beginning = if args.resume { resumable(&config)? } else { Beginning::New };
    match beginning {
        Beginning::New => run_folder::check_new(&config.run.out)?,
        Beginning::Finished => {
            let name = run_folder::trained_folder(&config);
            println!("the run is finished: {name} in {}", config.run.out.join(name).display());
            return Ok(());
        }
        Beginning::Again | Beginning::After(_) => {}
    }
    state::check_writable(&config.run.out)?;
    use_threads(config.run.threads)?;
    let device = open_device(config.run.device, config.run.compute_dtype)?;
    let ended = on_device!(device, |device| train_on(&device, config, beginning)?);
    let Some((signal, step, checkpoint)) = ended else { return Ok(()) };
    let message = format!("step {step} is done and saved in {}\ngo on with: {}", checkpoint.display(), again(args));
    Err(Interrupted::new(signal, message).into())
}

/// Where the run in the configuration's folder goes on.
fn resumable(config: &Config) -> Result<Beginning> {
    let found = state::find(config)?;
    for note in found.notes {
        eprintln!("note: {note}");
    }
    Ok(found.beginning)
}

/// Signal, steps done and checkpoint where the run was interrupted.
fn train_on<B: Backend>(device: &B, config: Config, beginning: Beginning) -> Result<Option<(i32, usize, PathBuf)>> {
    let files = open_model(&config.model)?;
    let data = open_windows(&config.data, &config.run)?;
    let mut reports: String = data.0.windows().map(|windows| data_report(windows, TRAINING)).collect();
    reports.extend(data.1.iter().map(|windows| data_report(windows, VALIDATION)));
    check_disk(&config, &files.config)?;
    let planned = match &beginning {
        Beginning::After(checkpoint) => run::with_state_of(&config, &checkpoint.saved),
        _ => config.clone(),
    };
    let mut run = Run::new(device, &run::this_machine(device)?, planned, files, data, tell_of_pinning)?;
    let folder = &config.run.out;
    let _lock = if beginning == Beginning::New {
        run_folder::create(&config)?;
        Some(run_folder::lock(folder)?)
    } else {
        None
    };
    let step = take_up(&mut run, &config, &beginning)?;
    run_folder::write_plan(folder, &run.plan().to_string())?;
    println!("{reports}{}", summary(run.plan()));
    let interrupts = Interrupts::listen("this step is finished, then a checkpoint is saved")?;
    let mut recorder = Recorder::new(&config, step, interrupts.clone())?;
    let outcome = run.train(&mut recorder);
    recorder.finish();
    write_report(folder);
    if let Ended::Interrupted { step, checkpoint } = outcome? {
        return Ok(interrupts.signal().map(|signal| (signal, step, checkpoint)));
    }
    let name = run_folder::trained_folder(&config);
    let trained = run_folder::put_trained(folder, name, |out| run.save(out).map_err(anyhow::Error::from));
    let trained = trained.with_context(|| format!("training is done, but the {name} could not be saved"))?;
    println!("{name} in {}", trained.display());
    Ok(None)
}

/// Page-locking goes at some 2 GB/s, and nothing else shows meanwhile.
fn tell_of_pinning(plan: &Plan) {
    const A_MOMENT: u64 = 4 << 30;
    let bytes = plan.bytes(Tier::Host);
    if bytes >= A_MOMENT && !plan.machine.shared {
        eprintln!("note: page-locking {} of host memory first", Bytes(bytes));
    }
}

/// Brings the run and its folder to the point from which it goes on; the steps that are done.
fn take_up<B: Backend>(run: &mut Run<B>, config: &Config, beginning: &Beginning) -> Result<usize> {
    let mut step = 0;
    if let Beginning::After(checkpoint) = beginning {
        run.resume(checkpoint)?;
        step = checkpoint.saved.step;
        let (was, is) = (&checkpoint.saved.compute_dtype, run.compute_dtype());
        let dtype = if was == is { String::new() } else { format!(", computing in {is} instead of {was}") };
        println!("going on after step {step} from {}{dtype}", checkpoint.folder.display());
    }
    if *beginning != Beginning::New {
        run_folder::update(config)?;
        state::Checkpoints::of(&config.run.out).clean(step)?;
    }
    Ok(step)
}

/// Refuses a run whose checkpoints and model do not fit the disk, before any work.
fn check_disk(config: &Config, model: &ModelConfig) -> Result<()> {
    let lora = config.lora.as_ref().map(|settings| Lora::open(settings, model)).transpose()?;
    // Where the plan chooses how moments are stored, room is left for the largest.
    let moments = run::moments_dtype(config.optimizer.state_dtype).unwrap_or(DType::F32);
    let lora = lora.as_ref().map(Lora::config);
    let one = state::checkpoint_bytes(model, lora, moments);
    let stay = config.run.checkpoint_every.map_or(0, |_| config.run.keep_checkpoints as u64);
    let best = u64::from(config.data.validation.is_some() && stay > 0);
    let there = state::Checkpoints::of(&config.run.out).steps()?.len() as u64;
    // One more while it is written.
    let wanted = (stay + best + 1).saturating_sub(there) * one + state::weight_bytes(model, lora);
    let what = format!("{} checkpoints of {} and the model need", stay + best + 1, Bytes(one));
    let hint = "set run.out to a larger disk, or set run.keep_checkpoints lower or run.checkpoint_every = \"off\"";
    Ok(state::check_room(&config.run.out, wanted, &what, hint)?)
}

/// The command that goes on.
fn again(args: &Args) -> String {
    let quoted = |text: &str| {
        let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_=./:+,".contains(c));
        if plain { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
    };
    let set: String = args.set.iter().map(|set| format!(" --set {}", quoted(set))).collect();
    format!("oomb train --config {}{set} --resume", quoted(&args.config.display().to_string()))
}

/// The page of the run as far as it came, if it came anywhere; a run is not a failure for want of it.
fn write_report(folder: &Path) {
    let metrics = std::fs::metadata(folder.join(METRICS_FILE));
    if metrics.is_ok_and(|metrics| metrics.len() == 0) {
        return;
    }
    let out = folder.join(report::REPORT_FILE);
    match report::write(&[folder.to_path_buf()], &out) {
        Ok(()) => println!("report in {}", out.display()),
        Err(error) => eprintln!("note: no report: {error}"),
    }
}

/// What is about to be trained, in a line.
fn summary(plan: &Plan) -> String {
    let [trained, parameters] = plan.num_parameters();
    let adapter = match &plan.request.lora {
        Some(lora) => format!(", an adapter of {} more of rank {}", format_count(trained as u64), lora.rank),
        None => String::new(),
    };
    let keep = plan.keep.map_or_else(String::new, |keep| format!(", keep {}", format!("{keep:?}").to_lowercase()));
    let optimizer = plan.optimizer_words().map_or_else(String::new, |words| format!(", optimizer: {words}"));
    format!(
        "{} parameters{adapter}, {} sequence(s) of {} tokens a step, chunks of {}{keep}, {} on {}, {} on the host{optimizer}",
        format_count(parameters as u64),
        plan.request.sequences_per_step,
        format_count(plan.request.sequence_tokens as u64),
        format_count(plan.request.chunk_tokens as u64),
        Bytes(plan.device_bytes()),
        plan.machine.device,
        Bytes(plan.bytes(Tier::Host)),
    )
}

/// Training and validation data as windows.
fn open_windows(data: &DataSettings, run: &RunSettings) -> Result<(Sources, Option<Windows>)> {
    let prepared_in = run.out.parent().unwrap_or(Path::new("")).join("prepared");
    let open = |paths: &[PathBuf], rows: &RowSettings, what| -> Result<Windows> {
        let source = Source { paths, tokenizer: data.tokenizer.as_ref(), rows, prepared_in: &prepared_in };
        Ok(Windows::cut(open_data(&source, what)?, cutting(data))?)
    };
    let mut parts = Vec::new();
    for source in data.all_sources() {
        parts.push((open(&source.paths, &data.rows_of(&source), TRAINING)?, source.weight));
    }
    let validation = data.validation.as_ref().map(|paths| open(paths, &data.rows, VALIDATION));
    Ok((Sources::new(parts)?, validation.transpose()?))
}

/// What the two kinds of data are called.
const TRAINING: &str = "training data";
const VALIDATION: &str = "validation data";
