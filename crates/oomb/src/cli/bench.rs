//! `oomb bench`: what this machine achieves, beside what it could.

mod step;

use super::machine::{on_device, open_default};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use oomb::bench::attention::{Case, Heads, Setup};
use oomb::bench::{self, Report, Row, Sampling};
use oomb::config::{Bytes, DeviceChoice, nearest, parse_bytes, parse_tokens};
use oomb::kv::select::Selection;
use oomb::model::config::ModelConfig;
use oomb::model::presets::{PRESETS, preset};
use oomb::rates;
use oomb_device::{Backend, DType};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measure products, attention, copies, or whole training steps.
///
/// Every figure is the median of several samples, each long enough to hide launches; where ceilings of the GPU are known,
/// achieved over ceiling is printed beside it. Sizes that are not given are small on the CPU.
#[derive(Subcommand)]
#[command(after_help = "Examples:
  oomb bench gemm --model qwen2.5-7b --tokens 8K
  oomb bench attention --model qwen2.5-7b --queries 8K --keys 64K --json attention.json
  oomb bench copy
  oomb bench rates
  oomb bench step --model qwen2.5-7b --sequence-tokens 64K --optimizer none")]
pub(crate) enum Bench {
    /// The linear layers of a model: forward, backward to the input, backward to the weight
    Gemm(GemmArgs),
    /// Attention over pages, dense or through a window, forward and backward
    Attention(AttentionArgs),
    /// Copies between host and device in pieces of several sizes, and within the device
    Copy(CopyArgs),
    /// What oomb plan predicts with: measured in under a minute, and saved for this device
    Rates(RatesArgs),
    /// Whole training steps of a model with random weights
    Step(step::Args),
}

#[derive(ClapArgs)]
struct Common {
    /// "auto" (a GPU if there is one), "cpu", "cuda:0"
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Write the figures to this file too, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Common {
    /// Before the work rather than after it.
    fn check(&self) -> Result<()> {
        let folder = self.json.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
        let Some(folder) = folder else { return Ok(()) };
        ensure!(folder.is_dir(), "--json: there is no folder {}", folder.display());
        Ok(())
    }

    fn write(&self, json: &serde_json::Value) -> Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        std::fs::write(path, format!("{json:#}\n")).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[derive(ClapArgs)]
struct Rates {
    #[command(flatten)]
    common: Common,
    /// Least seconds of each of five samples per figure
    #[arg(long, default_value_t = 0.1)]
    sample_seconds: f64,
}

impl Rates {
    fn bench<B: Backend>(&self, device: &B) -> Result<bench::Bench<B>> {
        self.common.check()?;
        let sample = Duration::try_from_secs_f64(self.sample_seconds);
        let sample = sample.with_context(|| format!("--sample-seconds: wanted a duration, got {}", self.sample_seconds))?;
        Ok(bench::Bench { device: device.clone(), sampling: Sampling { sample, ..Sampling::default() } })
    }

    fn tell<B: Backend>(&self, device: &B, setup: String, rows: Vec<Row>) -> Result<()> {
        let report = Report { device: device.name(), hardware: device.hardware(), setup, rows };
        print!("{report}");
        self.common.write(&report.json())
    }
}

/// Options of `oomb bench rates`.
#[derive(ClapArgs)]
pub(crate) struct RatesArgs {
    #[command(flatten)]
    rates: Rates,
}

impl RatesArgs {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let measured = bench::rates::run(&self.rates.bench(device)?)?;
        let json = serde_json::to_value(&measured)?;
        println!("{} ({})\n{json:#}", device.name(), device.hardware());
        println!("saved in {}", rates::save(&device.hardware(), &measured)?.display());
        self.rates.common.write(&json)
    }
}

/// Options of `oomb bench gemm`.
#[derive(ClapArgs)]
pub(crate) struct GemmArgs {
    #[command(flatten)]
    rates: Rates,
    /// A built-in shape; qwen2.5-7b where nothing is said, tiny on the CPU
    #[arg(long)]
    model: Option<String>,
    /// Rows of each product; 8K where nothing is said, 512 on the CPU. The head takes 1024 at most, as in training
    #[arg(long, value_parser = tokens)]
    tokens: Option<usize>,
}

/// Options of `oomb bench attention`.
#[derive(ClapArgs)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    rates: Rates,
    /// A built-in shape, for its heads; qwen2.5-7b where nothing is said
    #[arg(long, conflicts_with_all = ["heads", "kv_heads", "head_dim"])]
    model: Option<String>,
    /// Query heads
    #[arg(long, requires_all = ["kv_heads", "head_dim"])]
    heads: Option<usize>,
    /// Key and value heads
    #[arg(long, requires = "heads")]
    kv_heads: Option<usize>,
    /// Width of a head
    #[arg(long, requires = "heads")]
    head_dim: Option<usize>,
    /// Queries of one chunk; as many as keys where nothing is said
    #[arg(long, value_parser = tokens, requires = "keys")]
    queries: Option<usize>,
    /// Keys up to the last query. Without it: a causal square, a chunk over a long past, and that through a window
    #[arg(long, value_parser = tokens)]
    keys: Option<usize>,
    /// Keys that each query sees at most; all where nothing is said
    #[arg(long, value_parser = tokens, requires = "keys")]
    window: Option<usize>,
    /// Keys of one page
    #[arg(long, value_parser = tokens, default_value = "128")]
    page_tokens: usize,
    /// Pages of one call, as they stream through the device; all in one call where nothing is said
    #[arg(long)]
    group_pages: Option<usize>,
    /// Storage of the pages' gradients
    #[arg(long, value_enum, default_value_t = Gradients::F32)]
    grad_dtype: Gradients,
    /// Of values and of the places of pages
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Gradients {
    F32,
    Bf16,
}

impl Gradients {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }
}

/// Options of `oomb bench copy`.
#[derive(ClapArgs)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    rates: Rates,
    /// Bytes in all; 1GiB where nothing is said, 64MiB on the CPU
    #[arg(long, value_parser = bytes)]
    total: Option<u64>,
    /// Bytes of one copy, as often as wanted
    #[arg(long, value_parser = bytes, default_values = ["64KiB", "256KiB", "1MiB", "16MiB", "256MiB"])]
    piece: Vec<u64>,
}

fn tokens(text: &str) -> Result<usize, String> {
    let wrong = || format!("wanted a number of tokens above 0 such as 8192, 64K or 1M, got {text:?}");
    parse_tokens(text).and_then(|tokens| usize::try_from(tokens).ok()).filter(|&tokens| tokens > 0).ok_or_else(wrong)
}

fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("wanted bytes above 0 such as 64MiB or 125GiB, got {text:?}");
    parse_bytes(text).filter(|&bytes| bytes > 0).ok_or_else(wrong)
}

/// The built-in shape of that name.
fn shape(name: &str) -> Result<ModelConfig> {
    let Some(config) = preset(name) else {
        let hint = match nearest(name, PRESETS.into_iter()) {
            Some(nearest) => format!("did you mean {nearest:?}?"),
            None => format!("known are {}", PRESETS.join(", ")),
        };
        bail!("there is no built-in model {name:?}; {hint}");
    };
    Ok(config)
}

/// Where small sizes are the default.
fn is_cpu<B: Backend>(device: &B) -> bool {
    device.name() == "cpu"
}

/// Runs the command.
pub(crate) fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Gemm(args) => on_device!(open_default(args.rates.common.device)?, |device| args.run_on(&device)),
        Bench::Attention(args) => on_device!(open_default(args.rates.common.device)?, |device| args.run_on(&device)),
        Bench::Copy(args) => on_device!(open_default(args.rates.common.device)?, |device| args.run_on(&device)),
        Bench::Rates(args) => on_device!(open_default(args.rates.common.device)?, |device| args.run_on(&device)),
        Bench::Step(args) => step::run(args),
    }
}

impl GemmArgs {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let (model, tokens) = if is_cpu(device) { ("tiny", 512) } else { ("qwen2.5-7b", 8192) };
        let model = self.model.as_deref().unwrap_or(model);
        let config = shape(model)?;
        let rows = bench::gemm::run(&self.rates.bench(device)?, &config, self.tokens.unwrap_or(tokens))?;
        self.rates.tell(device, format!("linear layers of {model}, rows x out x in"), rows)
    }
}

impl CopyArgs {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let total = self.total.unwrap_or(if is_cpu(device) { 64 << 20 } else { 1 << 30 });
        let mut pieces: Vec<_> = self.piece.iter().map(|&piece| piece.min(total)).collect();
        pieces.sort_unstable();
        pieces.dedup();
        let rows = bench::copy::run(&self.rates.bench(device)?, total, &pieces)?;
        self.rates.tell(device, format!("{} in all, by size of one copy", Bytes(total)), rows)
    }
}

impl AttentionArgs {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let setup = Setup {
            heads: self.shape_of_heads()?,
            page_tokens: self.page_tokens,
            group_pages: self.group_pages,
            grad_dtype: self.grad_dtype.dtype(),
            seed: self.seed,
        };
        let rows = bench::attention::run(&self.rates.bench(device)?, &setup, &self.cases(is_cpu(device))?)?;
        let Heads { num_heads, num_kv_heads, head_dim } = setup.heads;
        let group = self.group_pages.map_or("all".to_owned(), |pages| pages.to_string());
        let words = format!(
            "{num_heads} heads on {num_kv_heads} of width {head_dim}, pages of {}, {group} in one call",
            self.page_tokens
        );
        self.rates.tell(device, words, rows)
    }
}

impl AttentionArgs {
    fn shape_of_heads(&self) -> Result<Heads> {
        let (Some(num_heads), Some(num_kv_heads), Some(head_dim)) = (self.heads, self.kv_heads, self.head_dim) else {
            let config = shape(self.model.as_deref().unwrap_or("qwen2.5-7b"))?;
            return Ok(Heads { num_heads: config.num_heads, num_kv_heads: config.num_kv_heads, head_dim: config.head_dim });
        };
        let divides = num_kv_heads > 0 && num_heads > 0 && num_heads.is_multiple_of(num_kv_heads);
        ensure!(divides, "--heads {num_heads} is not a multiple of --kv-heads {num_kv_heads}");
        ensure!(head_dim > 0, "--head-dim must be above 0");
        Ok(Heads { num_heads, num_kv_heads, head_dim })
    }

    fn cases(&self, small: bool) -> Result<Vec<Case>> {
        let Some(keys) = self.keys else {
            let (square, queries, keys, window) = if small { (256, 128, 1024, 256) } else { (16_384, 8192, 65_536, 8192) };
            let case = |queries, keys, selection| Case { queries, keys, selection };
            return Ok(vec![
                case(square, square, Selection::All),
                case(queries, keys, Selection::All),
                case(queries, keys, Selection::Window(window)),
            ]);
        };
        let queries = self.queries.unwrap_or(keys);
        ensure!(queries <= keys, "--queries {queries} is more than --keys {keys}: keys count up to the last query");
        Ok(vec![Case { queries, keys, selection: self.window.map_or(Selection::All, Selection::Window) }])
    }
}
