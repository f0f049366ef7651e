//! `oomb generate`: text that goes on from a prompt.

use super::machine::{on_device, open_device, use_threads};
use super::settings::Settings;
use anyhow::{Context, Result, ensure};
use clap::Args as ClapArgs;
use oomb::checkpoint;
use oomb::config::{Config, TokenizerSource, parse_tokens};
use oomb::data::Tokenizer;
use oomb::data::chat::ChatTemplate;
use oomb::engine::Engine;
use oomb::generate::sample::{Sampler, Sampling};
use oomb::generate::{Error, Limits, Writer};
use oomb::model::config::{ModelConfig, RopeScaling};
use oomb::run::{self, ModelFiles};
use oomb::run_folder::MODEL_FOLDER;
use oomb_device::Backend;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Go on from a prompt with a model, token after token; the text appears as it comes.
///
/// The prompt is taken as it is (special tokens that it spells out count as such, none are added), or with --chat as a message.
/// Greedy unless a temperature
/// is given.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb generate --run runs/emma --tokenizer bytes --prompt 'Emma Woodhouse, handsome,' --max-tokens 200
  oomb generate --model models/smollm2-135m --prompt 'The capital of France is' --max-tokens 20
  oomb generate --model models/smollm2-135m-instruct --chat --prompt 'What is a page table?'
  oomb generate --model models/smollm2-135m --prompt-file book.txt --temperature 0.8 --top-p 0.95 --seed 7 --stop '\\n\\n'")]
#[command(group = clap::ArgGroup::new("which").required(true).args(["model", "run"]))]
#[command(group = clap::ArgGroup::new("from").required(true).args(["prompt", "prompt_file"]))]
pub(crate) struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long)]
    model: Option<PathBuf>,
    /// Folder of a finished run: its model
    #[arg(long)]
    run: Option<PathBuf>,
    /// Text to go on from
    #[arg(long)]
    prompt: Option<String>,
    /// File with the text to go on from
    #[arg(long)]
    prompt_file: Option<PathBuf>,
    /// Take the prompt as a user's message, rendered by the checkpoint's chat template
    #[arg(long)]
    chat: bool,
    /// With --chat: a system message before it
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Tokens to generate at most
    #[arg(long, default_value = "256", value_parser = tokens)]
    max_tokens: usize,
    /// Divides the logits before drawing; 0 takes the best token always
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    temperature: f64,
    /// Draw from the so many best tokens only; 0 is all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Draw from the best tokens that together reach this probability; 1 is all
    #[arg(long, default_value_t = 1.0, value_parser = probability)]
    top_p: f64,
    /// Same seed, same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End before this text, as often as needed; \n and \t are understood
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// End at this token id too, as often as needed; the checkpoint's end tokens (eos_token_id) always end
    #[arg(long, value_name = "ID")]
    stop_token: Vec<u32>,
    /// "bytes", a tokenizer.json, or a checkpoint folder; the model's own where nothing is said
    #[arg(long)]
    tokenizer: Option<String>,
    /// Override a setting of [schedule], [kv], [model] or [run]: section.key=value
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

fn tokens(text: &str) -> Result<usize, String> {
    let count = parse_tokens(text).and_then(|count| usize::try_from(count).ok()).filter(|&count| count > 0);
    count.ok_or_else(|| format!("wanted a number of tokens above 0, such as 256 or 4K, got {text:?}"))
}

fn temperature(text: &str) -> Result<f64, String> {
    let value: Option<f64> = text.parse().ok();
    value.filter(|value| *value >= 0.0 && value.is_finite()).ok_or_else(|| format!("wanted a number from 0, got {text:?}"))
}

fn probability(text: &str) -> Result<f64, String> {
    let value: Option<f64> = text.parse().ok();
    value.filter(|value| *value > 0.0 && *value <= 1.0).ok_or_else(|| format!("wanted a number above 0, at most 1, got {text:?}"))
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let model = match (&args.model, &args.run) {
        (Some(model), _) => model.clone(),
        (None, Some(run)) => run.join(MODEL_FOLDER),
        (None, None) => PathBuf::new(),
    };
    ensure!(model.is_dir(), "there is no model in {}: give the folder of a checkpoint, or of a finished run", model.display());
    let tokenizer = open_tokenizer(args.tokenizer.as_deref(), &model)?;
    let text = if args.chat { conversation(args, &tokenizer)? } else { prompt_text(args)? };
    let prompt = tokenizer.encode(&text)?;
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt.into());
    }
    let context = (prompt.len() + args.max_tokens).to_string();
    let settings = Settings {
        command: "oomb generate",
        model: super::eval::path_text(&model)?,
        data: "none",
        sequence_tokens: &context,
        tokenizer: None,
        set: &args.set,
    };
    let config = settings.config()?;
    use_threads(config.run.threads)?;
    on_device!(open_device(config.run.device, config.run.compute_dtype)?, |device| {
        generate_on(&device, args, &config, (&model, &tokenizer, &prompt))
    })
}

fn generate_on<B: Backend>(
    device: &B,
    args: &Args,
    config: &Config,
    (model, tokenizer, prompt): (&Path, &Tokenizer, &[u32]),
) -> Result<()> {
    let files = ModelFiles::open(&config.model)?;
    warn_of_length(&files.config, config.data.sequence_tokens);
    let mut engine = open_generator(device, config, &files)?;
    let mut stop_tokens = checkpoint::end_tokens(model)?;
    stop_tokens.extend(&args.stop_token);
    let limits = Limits { max_tokens: args.max_tokens, stop_tokens };
    let stop_strings = args.stop.iter().map(|stop| stop.replace("\\n", "\n").replace("\\t", "\t")).collect();
    let Args { temperature, top_k, top_p, seed, .. } = *args;
    let mut sampler = Sampler::new(Sampling { temperature, top_k, top_p, seed });
    let (mut out, mut first) = (io::stdout().lock(), None);
    let started = Instant::now();
    let written = Writer { engine: &mut engine, tokenizer, limits, stop_strings }.write(prompt, &mut sampler, &mut |text| {
        first.get_or_insert_with(|| started.elapsed().as_secs_f64());
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    })?;
    writeln!(out)?;
    let (first, all) = (first.unwrap_or_default(), started.elapsed().as_secs_f64());
    let rate = written.tokens.saturating_sub(1) as f64 / (all - first).max(1e-9);
    eprintln!("{} tokens of prompt in {first:.1} s, {} generated, {rate:.1} tok/s", prompt.len(), written.tokens);
    Ok(())
}

/// The prompt, without the line break that ends a text file.
fn prompt_text(args: &Args) -> Result<String> {
    let Some(path) = &args.prompt_file else { return Ok(args.prompt.clone().unwrap_or_default()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the prompt {}", path.display()))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// The prompt as a user's message, up to where the assistant's begins.
fn conversation(args: &Args, tokenizer: &Tokenizer) -> Result<String> {
    let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let system = args.system.as_deref().map(|text| message("system", text));
    let messages: Vec<_> = system.into_iter().chain([message("user", &prompt_text(args)?)]).collect();
    let template = ChatTemplate::load(None, tokenizer.file())?;
    template.render(&messages, None, true).map_err(anyhow::Error::msg)
}

/// The tokenizer that was named, or the model's own.
pub(super) fn open_tokenizer(named: Option<&str>, model: &Path) -> Result<Tokenizer> {
    if let Some(named) = named {
        return Ok(Tokenizer::load(&TokenizerSource::from(named))?);
    }
    let own = model.join("tokenizer.json");
    ensure!(own.is_file(), "{} has no tokenizer.json: give --tokenizer, \"bytes\" where the model reads bytes", model.display());
    Ok(Tokenizer::load(&TokenizerSource::Path(own))?)
}

/// An engine that generates texts of at most `data.sequence_tokens`.
pub(super) fn open_generator<B: Backend>(device: &B, config: &Config, files: &ModelFiles) -> Result<Engine<B>> {
    let mut request = run::request(config, &files.config);
    request.loss_tile_tokens = Some(1);
    Ok(run::evaluator(device, &run::this_machine(device)?, &request, files, config.kv.selection)?)
}

/// Says when a model is asked for more positions than it was made for.
pub(super) fn warn_of_length(model: &ModelConfig, tokens: usize) {
    let limit = model.max_position_embeddings;
    if tokens > limit && !matches!(model.rope.scaling, RopeScaling::Dynamic { .. }) {
        eprintln!(
            "warning: {tokens} tokens are more than the {limit} that the model was made for (max_position_embeddings): beyond them it \
             may write nonsense; RoPE scaling stretches it: --set 'model.rope_scaling={{rope_type=\"yarn\",factor={:.1},\
             original_max_position_embeddings={limit}}}'",
            (tokens as f64 / limit as f64 * 10.0).ceil() / 10.0
        );
    }
}
