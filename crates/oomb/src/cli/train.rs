//! `oomb train`: a configuration to a trained model.

use super::machine::{on_device, open_data, open_device, open_model, use_threads};
use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use oomb::config::{Bytes, Config, DataSettings, RunSettings, format_count};
use oomb::data::{Source, Windows};
use oomb::metrics::{Audience, EventFile, MetricsFile, Progress, Record};
use oomb::model::params::{ParamSpec, param_specs};
use oomb::plan::{Plan, Tier};
use oomb::report;
use oomb::run::{self, Observer, Run, StepRecord};
use oomb::run_folder;
use oomb::train::LossSum;
use oomb_device::Backend;
use std::fs::File;
use std::io::{self, Stdout};
use std::path::{Path, PathBuf};

/// Train a model as a configuration file says.
///
/// Everything is checked before any work: keys, files, vocabulary, memory. The run's folder must be new; it gets the
/// resolved configuration, metrics.jsonl with a line per step, and the trained model.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb train --config configs/emma.toml
  oomb train --config configs/emma.toml --set run.out=runs/second --set optimizer.lr=1e-3")]
pub(crate) struct Args {
    /// TOML file; every key is checked
    #[arg(long)]
    config: PathBuf,
    /// Override a setting, as often as needed: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let config = Config::load(&args.config, &args.set)?;
    run_folder::check_new(&config.run.out)?;
    use_threads(config.run.threads)?;
    on_device!(open_device(config.run.device, config.run.compute_dtype)?, |device| train_on(&device, config))
}

fn train_on<B: Backend>(device: &B, config: Config) -> Result<()> {
    let files = open_model(&config.model)?;
    let data = open_windows(&config.data, &config.run)?;
    let folder = config.run.out.clone();
    let mut run = Run::new(device, &run::this_machine(device)?, config.clone(), files, data)?;
    run_folder::create(&config)?;
    run_folder::write_plan(&folder, &run.plan().to_string())?;
    println!("{}", summary(run.plan()));
    let mut recorder = Recorder::create(&config)?;
    let outcome = run.train(&mut recorder);
    recorder.progress.finish();
    write_report(&folder);
    outcome?;
    let model = folder.join(run_folder::MODEL_FOLDER);
    run.save(&model).context("training is done, but the model could not be saved")?;
    println!("model in {}", model.display());
    Ok(())
}

/// The page of the run as far as it came; a run is not a failure for want of it.
fn write_report(folder: &Path) {
    let out = folder.join(report::REPORT_FILE);
    match report::write(&[folder.to_path_buf()], &out) {
        Ok(()) => println!("report in {}", out.display()),
        Err(error) => eprintln!("note: no report: {error}"),
    }
}

/// What is about to be trained, in a line.
fn summary(plan: &Plan) -> String {
    let parameters: usize = param_specs(&plan.request.model).iter().map(ParamSpec::len).sum();
    let keep = plan.keep.map_or_else(String::new, |keep| format!(", keep {}", format!("{keep:?}").to_lowercase()));
    format!(
        "{} parameters, {} sequence(s) of {} tokens a step, chunks of {}{keep}, {} on {}, {} on the host",
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
fn open_windows(data: &DataSettings, run: &RunSettings) -> Result<(Windows, Option<Windows>)> {
    let prepared_in = run.out.parent().unwrap_or(Path::new("")).join("prepared");
    let open = |paths: &[PathBuf], what| -> Result<Windows> {
        let source = Source { paths, tokenizer: data.tokenizer.as_ref(), prepared_in: &prepared_in };
        Ok(Windows::new(open_data(&source, what)?, data.sequence_tokens)?)
    };
    let train = open(&data.train, "training data")?;
    let validation = data.validation.as_ref().map(|paths| open(paths, "validation data"));
    Ok((train, validation.transpose()?))
}

/// Writes every step down and shows it.
struct Recorder {
    metrics: MetricsFile,
    events: Option<EventFile<File>>,
    progress: Progress<Stdout>,
}

impl Recorder {
    fn create(config: &Config) -> Result<Self> {
        let metrics = MetricsFile::create(&config.run.out)?;
        let events = config.run.tensorboard.then(|| EventFile::create(&config.run.out)).transpose()?;
        let audience = Audience::of_this_process();
        Ok(Self { metrics, events, progress: Progress::new(audience, config.run.steps, config.run.log_every, io::stdout()) })
    }
}

impl Observer for Recorder {
    fn step(&mut self, step: &StepRecord, validation: Option<LossSum>) -> io::Result<()> {
        let seconds = step.elapsed.as_secs_f64();
        let record = Record {
            step: step.step,
            loss: step.loss.loss,
            grad_norm: step.loss.grad_norm,
            lr: step.lr,
            tokens: step.loss.tokens,
            seconds,
            tokens_per_second: step.loss.tokens as f64 / seconds,
            device_bytes: step.device_bytes,
            host_bytes: step.host_bytes,
            epoch: step.epochs,
            validation_loss: validation.map(|loss| loss.mean()),
        };
        self.metrics.append(&record)?;
        if let Some(events) = &mut self.events {
            events.append(&record)?;
        }
        self.progress.step(&record)
    }
}
