//! `oomb eval`: the loss of a model on a text.

use super::machine::{cutting, on_device, open_data, open_device, open_model, use_threads};
use super::settings::Settings;
use anyhow::{Context, Result};
use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oomb::config::{Config, TokenizerSource, format_count};
use oomb::data::{Source, Windows, is_prepared};
use oomb::metrics::Audience;
use oomb::run;
use oomb::train::LossSum;
use oomb_device::Backend;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Loss and perplexity of a checkpoint, or of a checkpoint with an adapter, on data, without training.
///
/// Documents are cut into sequences as in training; each label is predicted from all earlier tokens of its sequence.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb eval --model runs/emma/model --data data/emma.txt --tokenizer bytes --sequence-tokens 32K
  oomb eval --model models/smollm2-135m --data books/ --sequence-tokens 8K --sequences 4 --json
  oomb eval --model models/smollm2-135m --adapter runs/tuned/adapter --data books/ --sequence-tokens 8K")]
pub(crate) struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long)]
    model: PathBuf,
    /// Folder of a PEFT adapter to add to the model
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// A folder made by `oomb prepare`, a text file, or a folder of .txt files
    #[arg(long)]
    data: PathBuf,
    /// Context length: 2048, 64K, 1M
    #[arg(long)]
    sequence_tokens: String,
    /// For text: "bytes", a tokenizer.json, or a checkpoint folder; the model's own where nothing is said
    #[arg(long)]
    tokenizer: Option<String>,
    /// Only so many sequences, from the start of the data
    #[arg(long)]
    sequences: Option<NonZeroUsize>,
    /// Override a setting of [schedule], [kv] or [run]: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (model, data) = (path_text(&args.model)?, path_text(&args.data)?);
    let settings = Settings {
        command: "oomb eval",
        model,
        data,
        sequence_tokens: &args.sequence_tokens,
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
    let own =
        (!is_prepared(&args.data) && !files.tokenizer_files().is_empty()).then(|| TokenizerSource::Path(args.model.clone()));
    let tokenizer = config.data.tokenizer.as_ref().or(own.as_ref());
    let source = Source { paths: &config.data.train, tokenizer, rows: &config.data.rows, prepared_in: scratch.path() };
    let dataset = open_data(&source, "tokenising")?;
    dataset.check_vocabulary(files.config.vocab_size)?;
    let windows = Windows::cut(dataset, cutting(&config.data))?;
    let request = run::request(config, &files.config);
    let machine = run::this_machine(device)?;
    let mut engine = run::evaluator(device, &machine, &request, &files, config.kv.selection)?;
    let sequences = args.sequences.map_or(windows.len(), |wanted| wanted.get().min(windows.len()));
    let bar = progress_bar(sequences);
    let loss = run::evaluate(&mut engine, &windows, sequences, &mut |done, so_far| {
        bar.set_position(done as u64);
        bar.set_message(format!("loss {:.4}", so_far.mean()));
    });
    bar.finish_and_clear();
    let loss = loss?;
    let tokens = (0..sequences).map(|index| windows.num_tokens(index)).sum();
    let report = Report { sequences, tokens, loss };
    if args.json {
        println!("{}", report.json())
    } else {
        print!("{}", report.table())
    }
    Ok(())
}

/// Sequences done, on a terminal; hidden where output is piped.
fn progress_bar(sequences: usize) -> ProgressBar {
    let target = match Audience::of_this_process() {
        Audience::Terminal => ProgressDrawTarget::stderr(),
        Audience::Pipe => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} sequences  {msg}  left {eta}");
    let style = style.expect("the template is a constant that parses");
    ProgressBar::with_draw_target(Some(sequences as u64), target).with_style(style)
}

struct Report {
    sequences: usize,
    tokens: u64,
    loss: LossSum,
}

impl Report {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "sequences": self.sequences,
            "tokens": self.tokens,
            "labels": self.loss.labels,
            "loss": self.loss.mean(),
            "perplexity": self.loss.perplexity(),
        })
    }

    fn table(&self) -> String {
        let (tokens, labels) = (format_count(self.tokens), format_count(self.loss.labels as u64));
        let (loss, perplexity) = (self.loss.mean(), self.loss.perplexity());
        format!(
            "sequences   {}\ntokens      {tokens}\nlabels      {labels}\nloss        {loss:.4}\nperplexity  {perplexity:.3}\n",
            self.sequences
        )
    }
}

/// Paths go through a configuration, which is text.
fn path_text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8: rename it", path.display()))
}
