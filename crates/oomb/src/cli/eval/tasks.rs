//! `oomb eval --tasks`: a model's answers to long-context tasks.

use super::super::generate::{open_generator, open_tokenizer, warn_of_length};
use super::super::machine::{on_device, open_device, use_threads};
use super::super::settings::Settings;
use super::{Args, path_text, progress_bar, show};
use anyhow::{Context, Result};
use clap::{Args as ClapArgs, ValueEnum};
use oomb::checkpoint;
use oomb::config::{Config, parse_tokens};
use oomb::data::Tokenizer;
use oomb::generate::sample::{Sampler, Sampling};
use oomb::generate::{Limits, Writer};
use oomb::run::ModelFiles;
use oomb::tasks::{AnswerError, Answerer, Haystack, Sample, Suite, Task};
use oomb_device::Backend;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// What --tasks adds.
#[derive(ClapArgs)]
pub(super) struct TaskArgs {
    /// Answer long-context tasks instead of measuring the loss
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["data", "sequence_tokens", "sequences"])]
    #[arg(help_heading = "Long-context tasks", requires = "lengths")]
    pub(super) tasks: Vec<TaskName>,
    /// Lengths in tokens, the answer's included: 4K,32K
    #[arg(long, value_delimiter = ',', value_parser = length, requires = "tasks", help_heading = "Long-context tasks")]
    lengths: Vec<usize>,
    /// Samples of each task, length and depth
    #[arg(long, default_value = "10", requires = "tasks", help_heading = "Long-context tasks")]
    samples: NonZeroUsize,
    /// Where the needle of `needle` and `multikey` stands, percent of the text
    #[arg(long, value_delimiter = ',', default_value = "0,25,50,75,100", value_parser = clap::value_parser!(u8).range(0..=100))]
    #[arg(requires = "tasks", help_heading = "Long-context tasks")]
    depths: Vec<u8>,
    /// Text file to hide things in; sentences that say nothing where none is named
    #[arg(long, requires = "tasks", help_heading = "Long-context tasks")]
    haystack: Option<PathBuf>,
    /// Same seed, same samples
    #[arg(long, default_value_t = 0, requires = "tasks", help_heading = "Long-context tasks")]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TaskName {
    /// One number hidden at a given depth
    Needle,
    /// The same among other keys and numbers
    #[value(name = "multikey")]
    MultiKey,
    /// Four numbers of one key
    #[value(name = "multivalue")]
    MultiValue,
    /// The numbers of four keys
    #[value(name = "multiquery")]
    MultiQuery,
    /// Which variables have a value, over a chain of assignments
    Variables,
    /// The ten most common words of a list
    Common,
    /// The three most frequent words
    Frequent,
}

impl From<TaskName> for Task {
    fn from(name: TaskName) -> Self {
        match name {
            TaskName::Needle => Self::Needle,
            TaskName::MultiKey => Self::MultiKey,
            TaskName::MultiValue => Self::MultiValue,
            TaskName::MultiQuery => Self::MultiQuery,
            TaskName::Variables => Self::Variables,
            TaskName::Common => Self::CommonWords,
            TaskName::Frequent => Self::FrequentWords,
        }
    }
}

fn length(text: &str) -> Result<usize, String> {
    let length = parse_tokens(text).and_then(|length| usize::try_from(length).ok()).filter(|&length| length > 0);
    length.ok_or_else(|| format!("wanted a length in tokens such as 4096 or 4K, got {text:?}"))
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<()> {
    let mut suite = Suite {
        tasks: args.tasks.tasks.iter().map(|&name| name.into()).collect(),
        lengths: args.tasks.lengths.clone(),
        depths: args.tasks.depths.clone(),
        samples: args.tasks.samples.get(),
        seed: args.tasks.seed,
    };
    suite.lengths.sort_unstable();
    suite.lengths.dedup();
    suite.depths.sort_unstable();
    suite.depths.dedup();
    let longest = suite.lengths.last().copied().unwrap_or_default().to_string();
    let model = path_text(&args.model)?;
    let set = &args.set;
    let settings = Settings { command: "oomb eval", model, data: "none", sequence_tokens: &longest, tokenizer: None, set };
    let config = settings.config()?;
    let haystack = match &args.tasks.haystack {
        None => Haystack::noise(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the haystack {}", path.display()))?;
            Haystack::text(&text).with_context(|| format!("{} cannot be a haystack", path.display()))?
        }
    };
    let tokenizer = open_tokenizer(args.tokenizer.as_deref(), &args.model)?;
    use_threads(config.run.threads)?;
    on_device!(open_device(config.run.device, config.run.compute_dtype)?, |device| {
        answer_on(&device, args, &config, (&suite, &haystack, &tokenizer))
    })
}

fn answer_on<B: Backend>(
    device: &B,
    args: &Args,
    config: &Config,
    (suite, haystack, tokenizer): (&Suite, &Haystack, &Tokenizer),
) -> Result<()> {
    let files = ModelFiles::open(&config.model)?;
    warn_of_length(&files.config, config.data.sequence_tokens);
    let mut engine = open_generator(device, config, &files)?;
    let stop_tokens = checkpoint::end_tokens(&args.model)?;
    let limits = Limits { max_tokens: 0, stop_tokens };
    let mut model = Model(Writer { engine: &mut engine, tokenizer, limits, stop_strings: Vec::new() });
    let bar = progress_bar(suite.cells().len() * suite.samples, "samples");
    let mut sum = 0.0;
    let report = suite.run(haystack, tokenizer, &mut model, &mut |done, last| {
        sum += last.score;
        bar.set_position(done as u64);
        bar.set_message(format!("accuracy {:.1} %", 100.0 * sum / done as f64));
    })?;
    bar.finish_and_clear();
    let json = serde_json::to_value(&report)?;
    let title = format!("{}: accuracy (%) by task, depth and length", args.model.display());
    show(args, &json, &report.table(), &report.svg(&title))
}

/// A model answers greedily.
struct Model<'a, B: Backend>(Writer<'a, B>);

impl<B: Backend> Answerer for Model<'_, B> {
    fn answer(&mut self, sample: &Sample, max_tokens: usize) -> Result<String, AnswerError> {
        self.0.limits.max_tokens = max_tokens;
        Ok(self.0.write(&sample.ids, &mut Sampler::new(Sampling::GREEDY), &mut |_| Ok(()))?.text)
    }
}
