//! `oomb prepare`: text files to token shards.

use anyhow::{Result, ensure};
use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oomb::config::{Bytes, TokenizerSource, format_count};
use oomb::data::{Advance, Dataset, Existing, PrepareRequest, Prepared, Tokenizer, prepare};
use oomb::metrics::Audience;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Tokenise text files into a folder of shards that `data.train` can name.
///
/// Each file is one document; documents do not see each other in training. No special tokens are added. The folder
/// appears complete or not at all, and nothing is overwritten unless asked for.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb prepare data/emma.txt --out data/emma --tokenizer bytes
  oomb prepare books/ notes.txt --out data/books --tokenizer models/qwen2.5-7b")]
pub(crate) struct Args {
    /// Text files in UTF-8, or folders of .txt files
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Folder to make
    #[arg(long)]
    out: PathBuf,
    /// "bytes" (each byte is a token), a tokenizer.json, or the folder of a checkpoint
    #[arg(long)]
    tokenizer: String,
    /// Replace a folder that was prepared before
    #[arg(long)]
    overwrite: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(!args.tokenizer.is_empty(), "--tokenizer is empty: give \"bytes\", a tokenizer.json, or a checkpoint folder");
    let tokenizer = Tokenizer::load(&TokenizerSource::from(args.tokenizer.as_str()))?;
    let existing = if args.overwrite { Existing::Overwrite } else { Existing::Keep };
    let request = PrepareRequest { inputs: &args.inputs, out: &args.out, tokenizer: &tokenizer, existing };
    let mut progress = PrepareProgress::new("tokenising");
    let prepared = prepare(&request, &mut |advance| progress.advance(advance));
    progress.finish();
    match &prepared? {
        Prepared::Written { dataset, skipped } => {
            for path in skipped {
                eprintln!("note: {} is empty and was left out", path.display());
            }
            println!("{}", summary(dataset));
        }
        Prepared::AlreadyThere(dataset) => println!("{} (made before from the same text)", summary(dataset)),
    }
    Ok(())
}

fn summary(dataset: &Dataset) -> String {
    let index = dataset.index();
    let plural = |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
    format!(
        "{}: {} tokens in {}, vocabulary {}, {}",
        dataset.folder().display(),
        format_count(index.num_tokens),
        plural(index.documents.len(), "document"),
        index.vocab_size,
        plural(index.shards.len(), "shard"),
    )
}

/// A bar on a terminal, else a line every few seconds.
pub(crate) struct PrepareProgress {
    what: &'static str,
    audience: Audience,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl PrepareProgress {
    /// Nothing is shown before the first advance.
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, audience: Audience::of_this_process(), bar: None, last_line: Instant::now() }
    }

    /// Shows how far it is.
    pub(crate) fn advance(&mut self, advance: Advance) {
        let tokens = format!("{} tokens", format_count(advance.num_tokens));
        if self.audience == Audience::Terminal {
            let bar = self.bar.get_or_insert_with(|| {
                let template = "{prefix} {bar:24} {bytes}/{total_bytes}  {bytes_per_sec}  left {eta}  {msg}";
                let style = ProgressStyle::with_template(template).expect("the template is a constant that parses");
                let bar = ProgressBar::with_draw_target(Some(advance.total_bytes), ProgressDrawTarget::stderr());
                bar.with_style(style).with_prefix(self.what)
            });
            bar.set_position(advance.done_bytes);
            bar.set_message(tokens);
        } else if self.last_line.elapsed() >= Duration::from_secs(5) {
            self.last_line = Instant::now();
            let (done, total) = (Bytes(advance.done_bytes), Bytes(advance.total_bytes));
            eprintln!("{}: {done} of {total}, {tokens}", self.what);
        }
    }

    /// Clears the bar.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
