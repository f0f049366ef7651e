//! `oomb eval`: the loss of a model on a text, by position too, or its answers to long-context tasks.

mod tasks;

use super::machine::{cutting, on_device, open_data, open_device, open_model, use_threads};
use super::settings::Settings;
use anyhow::{Context, Result};
use clap::{Args as ClapArgs, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oomb::config::{Config, TokenizerSource, format_count};
use oomb::data::{Source, Windows, is_prepared};
use oomb::metrics::Audience;
use oomb::positions::{Positions, Spacing};
use oomb::run;
use oomb::train::{self, LossSum};
use oomb_device::Backend;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Loss and perplexity of a checkpoint, or of one with an adapter, on data, overall and by position; or its answers to long-context
/// tasks.
///
/// Documents are cut into sequences as in training; each label is predicted from all earlier tokens of its sequence. With
/// --tasks the model answers questions about texts of given lengths instead, in the manner of RULER (arXiv 2404.06654).
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb eval --model runs/emma/model --data data/emma.txt --tokenizer bytes --sequence-tokens 32K
  oomb eval --model models/smollm2-135m --data books/ --sequence-tokens 8K --sequences 4 --json loss.json --svg loss.svg
  oomb eval --model models/smollm2-135m --tasks needle,variables --lengths 1K,4K --samples 10 --haystack book.txt --svg needle.svg
  oomb eval --model models/smollm2-135m --adapter runs/tuned/adapter --data books/ --sequence-tokens 8K")]
pub(crate) struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long)]
    model: PathBuf,
    /// Folder of a PEFT adapter to add to the model
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// A folder made by `oomb prepare`, a text file, or a folder of .txt files
    #[arg(long, required_unless_present = "tasks")]
    data: Option<PathBuf>,
    /// Context length: 2048, 64K, 1M
    #[arg(long, required_unless_present = "tasks")]
    sequence_tokens: Option<String>,
    /// For text: "bytes", a tokenizer.json, or a checkpoint folder; the model's own where nothing is said
    #[arg(long)]
    tokenizer: Option<String>,
    /// Only so many sequences, from the start of the data
    #[arg(long)]
    sequences: Option<NonZeroUsize>,
    /// Override a setting of [schedule], [kv] or [run]: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Buckets of the loss by position: doubling, or sixteen of the same length
    #[arg(long, value_enum, default_value_t = Buckets::Log)]
    buckets: Buckets,
    #[command(flatten)]
    tasks: tasks::TaskArgs,
    /// Print one JSON object instead of a table, or write it to FILE beside the table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Draw the result to this file: loss by position, or accuracy by length and depth
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Buckets {
    /// 0 to 63, then each as long as all before it
    Log,
    /// Sixteen
    Equal,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !args.tasks.tasks.is_empty() {
        return tasks::run(args);
    }
    let (data, sequence_tokens) = (args.data.as_deref().unwrap_or(Path::new("")), args.sequence_tokens.as_deref());
    let (model, data) = (path_text(&args.model)?, path_text(data)?);
    let settings = Settings {
        command: "oomb eval",
        model,
        data,
        sequence_tokens: sequence_tokens.unwrap_or_default(),
        tokenizer: args.tokenizer.as_deref(),
        set: &args.set,
    };
    let config = settings.config()?;
    use_threads(config.run.threads)?;
    on_device!(open_device(config.run.device, config.run.compute_dtype)?, |device| evaluate_on(&device, args, &config))
}

fn evaluate_on<B: Backend>(device: &B, args: &Args, config: &Config) -> Result<()> {
    let mut files = open_model(&config.model)?;
    if let Some(adapter) = &args.adapter {
        files = files.with_adapter(adapter)?;
    }
    let scratch = tempfile::tempdir().context("cannot create a temporary folder for the tokens")?;
    let prepared = args.data.as_deref().is_some_and(is_prepared);
    let own = (!prepared && !files.tokenizer_files().is_empty()).then(|| TokenizerSource::Path(args.model.clone()));
    let tokenizer = config.data.tokenizer.as_ref().or(own.as_ref());
    let source = Source { paths: &config.data.train, tokenizer, rows: &config.data.rows, prepared_in: scratch.path() };
    let dataset = open_data(&source, "tokenising")?;
    dataset.check_vocabulary(files.config.vocab_size)?;
    let windows = Windows::cut(dataset, cutting(&config.data))?;
    let request = run::request(config, &files.config);
    let machine = run::this_machine(device)?;
    let mut engine = run::evaluator(device, &machine, &request, &files, config.kv.selection)?;
    let sequences = args.sequences.map_or(windows.len(), |wanted| wanted.get().min(windows.len()));
    let bar = progress_bar(sequences, "sequences");
    let spacing = match args.buckets {
        Buckets::Log => Spacing::Log,
        Buckets::Equal => Spacing::Equal,
    };
    let (mut loss, mut positions) = (LossSum::default(), Positions::new(config.data.sequence_tokens, spacing));
    for index in 0..sequences {
        let sequence = windows.get(index)?;
        let losses = train::token_losses(&mut engine, &sequence)?;
        loss.sum += losses.iter().sum::<f64>();
        loss.labels += sequence.num_labels();
        positions.add(&sequence.positions, &sequence.labels, &losses);
        bar.set_position(index as u64 + 1);
        bar.set_message(format!("loss {:.4}", loss.mean()));
    }
    bar.finish_and_clear();
    let tokens = (0..sequences).map(|index| windows.num_tokens(index)).sum();
    let title = format!("{}: loss (nats) by position, {sequences} sequences", args.model.display());
    let svg = positions.svg(&title);
    let report = Report { sequences, tokens, loss, positions };
    show(args, &report.json(), &report.table(), &svg)
}

/// Prints the table, or the JSON where that was asked for, and writes the files.
fn show(args: &Args, json: &serde_json::Value, table: &str, svg: &str) -> Result<()> {
    let write = |path: &Path, text: &str| std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => println!("{json}"),
        Some(path) => {
            print!("{table}");
            write(path, &format!("{json:#}\n"))?;
        }
        None => print!("{table}"),
    }
    args.svg.as_deref().map_or(Ok(()), |path| write(path, svg))
}

/// So many of `what` done, on a terminal; hidden where output is piped.
fn progress_bar(count: usize, what: &str) -> ProgressBar {
    let target = match Audience::of_this_process() {
        Audience::Terminal => ProgressDrawTarget::stderr(),
        Audience::Pipe => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {prefix}  {msg}  left {eta}");
    let style = style.expect("the template is a constant that parses");
    ProgressBar::with_draw_target(Some(count as u64), target).with_style(style).with_prefix(what.to_owned())
}

struct Report {
    sequences: usize,
    tokens: u64,
    loss: LossSum,
    positions: Positions,
}

impl Report {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "sequences": self.sequences,
            "tokens": self.tokens,
            "labels": self.loss.labels,
            "loss": self.loss.mean(),
            "perplexity": self.loss.perplexity(),
            "by_position": self.positions.losses(),
        })
    }

    fn table(&self) -> String {
        let (tokens, labels) = (format_count(self.tokens), format_count(self.loss.labels as u64));
        let (loss, perplexity) = (self.loss.mean(), self.loss.perplexity());
        let mut by_position = format!("{:>23}  {:>11}  {:>8}  {:>10}\n", "position", "labels", "loss", "perplexity");
        for bucket in self.positions.losses() {
            let range = format!("{} – {}", format_count(bucket.bucket.start as u64), format_count(bucket.bucket.end as u64 - 1));
            let labels = format_count(bucket.bucket.labels as u64);
            let (loss, perplexity) = (bucket.loss.unwrap_or(f64::NAN), bucket.perplexity.unwrap_or(f64::NAN));
            by_position.push_str(&format!("{range:>23}  {labels:>11}  {loss:>8.4}  {perplexity:>10.3}\n"));
        }
        format!(
            "sequences   {}\ntokens      {tokens}\nlabels      {labels}\nloss        {loss:.4}\nperplexity  {perplexity:.3}\n\n{by_position}",
            self.sequences
        )
    }
}

/// Paths go through a configuration, which is text.
pub(super) fn path_text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8: rename it", path.display()))
}
