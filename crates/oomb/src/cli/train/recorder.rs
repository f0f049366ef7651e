//! Writes every step of a run down and shows it. It must not know how a run begins.

use crate::cli::interrupt::Interrupts;
use oomb::config::Config;
use oomb::metrics::{Audience, EventFile, MetricsFile, Progress, Record, Spikes};
use oomb::run::{Observer, Outcome, StepRecord};
use oomb::train::LossSum;
use std::fs::File;
use std::io::{self, Stdout};

/// `metrics.jsonl`, TensorBoard's events, progress, and the ear for signals.
pub(super) struct Recorder {
    metrics: MetricsFile,
    events: Option<EventFile<File>>,
    progress: Progress<Stdout>,
    spikes: Spikes,
    interrupts: Interrupts,
}

impl Recorder {
    /// For a run that begins after `step`. The lines of later steps are dropped: those steps are done again.
    pub(super) fn new(config: &Config, step: usize, interrupts: Interrupts) -> io::Result<Self> {
        let (metrics, kept) = MetricsFile::open(&config.run.out, step)?;
        if kept < step {
            eprintln!("note: metrics.jsonl has {kept} of the {step} steps that are done");
        }
        let events = config.run.tensorboard.then(|| EventFile::create(&config.run.out)).transpose()?;
        let progress = Progress::new(Audience::of_this_process(), config.run.steps, config.run.log_every, io::stdout());
        Ok(Self { metrics, events, progress, spikes: Spikes::default(), interrupts })
    }

    /// Leaves the last state on the terminal.
    pub(super) fn finish(&mut self) {
        self.progress.finish();
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
            in_bytes: step.traffic.in_bytes,
            out_bytes: step.traffic.out_bytes,
            page_hit_rate: step.traffic.hit_rate().filter(|rate| *rate < 1.0),
            epoch: step.epochs,
            validation_loss: validation.map(|loss| loss.mean()),
            skipped: step.outcome == Outcome::Skipped,
        };
        self.metrics.append(&record)?;
        if let Some(events) = &mut self.events {
            events.append(&record)?;
        }
        if let Some(median) = self.spikes.see(record.loss) {
            let text = format!("step {}: loss {:.4} is a spike; the median before it was {median:.4}", record.step, record.loss);
            self.progress.note(&text)?;
        }
        self.progress.step(&record)
    }

    fn note(&mut self, text: &str) -> io::Result<()> {
        self.progress.note(text)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.metrics.sync()
    }

    fn wants_to_stop(&self) -> bool {
        self.interrupts.signal().is_some()
    }
}
