//! `oomb prepare`: files of text to token shards.

use anyhow::{Context, Result, ensure};
use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use oomb::config::{Bytes, DataFormat, LossOn, Malformed, RowSettings, TokenizerSource, format_count};
use oomb::data::{Advance, Dataset, Existing, PrepareRequest, Prepared, Preview, Reading, Tokenizer, prepare, preview};
use oomb::metrics::Audience;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Tokenise files of text into a folder of shards that `data.train` can name.
///
/// A text file is one document; of .jsonl and .parquet files each row is one. Documents do not see each other in training.
/// No special tokens are added, but those of a chat template. The folder appears complete or not at all, and nothing is
/// overwritten unless asked for; rows that were left out are listed in its left_out.jsonl.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb prepare data/emma.txt --out data/emma --tokenizer bytes
  oomb prepare books/ 'more/**/*.jsonl.zst' --out data/books --tokenizer models/qwen
  oomb prepare web.parquet --field content --skip-malformed --out data/web --tokenizer models/qwen
  oomb prepare talks.jsonl --format chat --tokenizer models/smollm2 --preview
  oomb prepare talks.jsonl --format chat --tokenizer models/smollm2 --out data/talks")]
pub(crate) struct Args {
    /// Files (.jsonl and .parquet hold rows, anything else is text in UTF-8; .gz and .zst are unpacked), folders, patterns
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Folder to make
    #[arg(long, required_unless_present = "preview")]
    out: Option<PathBuf>,
    /// "bytes" (each byte is a token), a tokenizer.json, or the folder of a checkpoint
    #[arg(long)]
    tokenizer: String,
    /// What rows hold: "text", or "chat" (a list of messages, rendered by the checkpoint's chat template)
    #[arg(long, default_value = "text")]
    format: DataFormat,
    /// Field or column of rows to read [default: text; messages with --format chat]
    #[arg(long)]
    field: Option<String>,
    /// Checkpoint folder, tokenizer_config.json or .jinja file with the chat template [default: beside the tokenizer]
    #[arg(long, value_name = "PATH")]
    chat_template: Option<PathBuf>,
    /// Which tokens of a conversation are trained: "assistant" (its turns with the token that ends them) or "all"
    /// [default: assistant]
    #[arg(long)]
    loss_on: Option<LossOn>,
    /// Leave out rows that cannot be used, instead of stopping at the first
    #[arg(long)]
    skip_malformed: bool,
    /// Show the first document as it will be trained, and write nothing
    #[arg(long, conflicts_with_all = ["out", "overwrite"])]
    preview: bool,
    /// Replace a folder that was prepared before
    #[arg(long)]
    overwrite: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(!args.tokenizer.is_empty(), "--tokenizer is empty: give \"bytes\", a tokenizer.json, or a checkpoint folder");
    let chat_only = args.chat_template.is_some() || args.loss_on.is_some();
    ensure!(
        args.format == DataFormat::Chat || !chat_only,
        "--chat-template and --loss-on are for conversations: add --format chat, or leave them out"
    );
    let tokenizer = Tokenizer::load(&TokenizerSource::from(args.tokenizer.as_str()))?;
    let rows = RowSettings {
        format: Some(args.format),
        field: args.field.clone(),
        chat_template: args.chat_template.clone(),
        loss_on: args.loss_on,
        malformed: args.skip_malformed.then_some(Malformed::Skip),
    };
    let reading = Reading::load(&rows, &tokenizer)?;
    if args.preview {
        print!("{}", shown(&preview(&args.inputs, &tokenizer, &reading)?, Audience::of_this_process()));
        return Ok(());
    }
    let out = args.out.as_deref().context("--out is missing: name the folder to make")?;
    let existing = if args.overwrite { Existing::Overwrite } else { Existing::Keep };
    let request = PrepareRequest { inputs: &args.inputs, out, tokenizer: &tokenizer, reading: &reading, existing };
    let mut progress = PrepareProgress::new("tokenising");
    let prepared = prepare(&request, &mut |advance| progress.advance(advance));
    progress.finish();
    match &prepared? {
        Prepared::Written { dataset, left_out } => {
            for row in left_out {
                let place = if row.row == 0 { row.file.clone() } else { format!("{} row {}", row.file, row.row) };
                eprintln!("left out: {place}: {}", row.why);
            }
            let all: u64 = dataset.index().files.iter().map(|file| file.num_empty + file.num_malformed).sum();
            if all > left_out.len() as u64 {
                eprintln!(
                    "left out: {} more, in {}",
                    all - left_out.len() as u64,
                    dataset.folder().join("left_out.jsonl").display()
                );
            }
            println!("{}", summary(dataset));
        }
        Prepared::AlreadyThere(dataset) => println!("{} (made before from the same text)", summary(dataset)),
    }
    Ok(())
}

fn summary(dataset: &Dataset) -> String {
    let index = dataset.index();
    let plural = |count: u64, word: &str| format!("{} {word}{}", format_count(count), if count == 1 { "" } else { "s" });
    let sum = |count: fn(&oomb::data::SourceFile) -> u64| index.files.iter().map(count).sum::<u64>();
    let trained = if dataset.is_masked() { format!(" ({} trained)", format_count(index.num_trained)) } else { String::new() };
    let (empty, malformed) = (sum(|file| file.num_empty), sum(|file| file.num_malformed));
    let left_out = match (empty, malformed) {
        (0, 0) => String::new(),
        _ => format!("; left out: {} with nothing to train, {} malformed", format_count(empty), format_count(malformed)),
    };
    format!(
        "{}: {} tokens{trained} in {} of {}, vocabulary {}, {}{left_out}",
        dataset.folder().display(),
        format_count(index.num_tokens),
        plural(index.num_documents, "document"),
        plural(index.files.len() as u64, "file"),
        index.vocab_size,
        plural(index.shards.len() as u64, "shard"),
    )
}

/// The text with what is trained between marks, in green on a terminal that has colours.
fn shown(preview: &Preview, audience: Audience) -> String {
    let colour = audience == Audience::Terminal && std::env::var_os("NO_COLOR").is_none();
    let (open, close) = if colour { ("\x1b[32m⟦", "⟧\x1b[0m") } else { ("⟦", "⟧") };
    let (mut text, mut done) = (String::new(), 0);
    for run in &preview.trained {
        text += &preview.text[done..run.start];
        text += &format!("{open}{}{close}", &preview.text[run.clone()]);
        done = run.end;
    }
    text += &preview.text[done..];
    let (all, trained) = (format_count(preview.num_tokens as u64), format_count(preview.num_trained as u64));
    format!("{}: {all} tokens, {trained} of them trained, between ⟦ and ⟧\n{}\n", preview.name, text.trim_end_matches('\n'))
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
