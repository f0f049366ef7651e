//! `oomb bench step`: whole training steps.

use super::{Common, Gradients, bytes, is_cpu, shape, tokens};
use crate::cli::machine::{on_device, open_default};
use crate::cli::plan::prediction;
use anyhow::{Result, ensure};
use clap::{Args as ClapArgs, ValueEnum};
use oomb::bench::step::{self, Repeat, StepReport};
use oomb::config::{Bytes, Placement, StateDtype, format_count, parse_bytes};
use oomb::kv::select::Selection;
use oomb::model::activations;
use oomb::plan::{Plan, Request, Tier, Training};
use oomb::run;
use oomb_device::Backend;

/// Options of `oomb bench step`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) common: Common,
    /// A built-in shape; qwen2.5-7b where nothing is said, tiny on the CPU
    #[arg(long)]
    model: Option<String>,
    /// Context length; 16K where nothing is said, 2K on the CPU
    #[arg(long, value_parser = tokens)]
    sequence_tokens: Option<usize>,
    /// Sequences of one step
    #[arg(long, default_value_t = 1)]
    sequences: usize,
    /// Tokens processed at once; a multiple of the page length. 8K where nothing is said, 512 on the CPU
    #[arg(long, value_parser = tokens)]
    chunk_tokens: Option<usize>,
    /// What a chunk keeps for its own backward
    #[arg(long, value_enum, default_value_t = Keep::Auto)]
    keep: Keep,
    /// Whether weights are updated
    #[arg(long, value_enum, default_value_t = Optimizer::None)]
    optimizer: Optimizer,
    /// Storage of the optimizer's moments: "auto", "f32", "bf16" or "int8"
    #[arg(long, default_value = "auto")]
    optimizer_state: StateDtype,
    /// Whether bf16 weights have f32 masters; as long as they fit where nothing is said
    #[arg(long, value_name = "true|false")]
    master_weights: Option<bool>,
    /// Where the optimizer's state lives: "auto", "device" or "host"
    #[arg(long, default_value = "auto")]
    optimizer_placement: Placement,
    /// Device memory for pages and their gradients; what is left where nothing is said
    #[arg(long, value_parser = bytes)]
    device_budget: Option<u64>,
    /// On: only the pages in use are on the device, all others stream. Off: all of them are, or the step is refused. As fits
    /// where nothing is said
    #[arg(long, value_enum, conflicts_with = "device_budget")]
    offload: Option<Offload>,
    /// Device memory for activations of more chunks than one; what is left where nothing is said
    #[arg(long, value_parser = bytes_or_none)]
    keep_budget: Option<u64>,
    /// Page-locked host memory for them; what is left where nothing is said
    #[arg(long, value_parser = bytes_or_none)]
    keep_host_budget: Option<u64>,
    /// Tokens that each one sees at most; all earlier ones where nothing is said
    #[arg(long, value_parser = tokens)]
    window: Option<usize>,
    /// Keys of one page
    #[arg(long, value_parser = tokens, default_value = "128")]
    page_tokens: usize,
    /// Pages that move together
    #[arg(long, default_value_t = 16)]
    group_pages: usize,
    /// Groups that are fetched ahead of their use
    #[arg(long, default_value_t = 2)]
    prefetch_groups: usize,
    /// Tokens whose logits exist at once; chosen by the plan where nothing is said
    #[arg(long, value_parser = tokens)]
    loss_tile_tokens: Option<usize>,
    /// Storage of the pages' gradients
    #[arg(long, value_enum, default_value_t = Gradients::F32)]
    grad_dtype: Gradients,
    /// Steps that are timed
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Steps before them that are not: the first compiles, and touches memory for the first time
    #[arg(long, default_value_t = 1)]
    warm_up: usize,
    /// Of weights and tokens
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print every planned buffer
    #[arg(long)]
    plan: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Keep {
    /// As much as fits
    Auto,
    /// Layer inputs
    Inputs,
    /// Attention outputs too
    Attention,
    /// What the MLP reads too
    Mlp,
    /// Everything
    All,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Offload {
    On,
    Off,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Optimizer {
    None,
    Adamw,
}

fn bytes_or_none(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("wanted bytes such as 0B, 64MiB or 125GiB, got {text:?}"))
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    on_device!(open_default(args.common.device)?, |device| args.run_on(&device))
}

impl Args {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let (mut request, machine) = (self.request(is_cpu(device))?, run::this_machine(device)?);
        self.common.check()?;
        match self.offload {
            Some(Offload::On) => request.device_budget = Some(request.smallest_budget(&machine)),
            Some(Offload::Off) => request.device_budget = Some(request.largest_budget(&machine)),
            None => {}
        }
        let plan = Plan::new(&request, &machine)?;
        if self.plan {
            print!("{plan}\n\n");
        }
        let selection = self.window.map_or(Selection::All, Selection::Window);
        let repeat = Repeat { warm_up: self.warm_up, steps: self.repeat, seed: self.seed };
        let prediction = prediction(&plan, selection, &device.hardware())?;
        let report = step::run(device, plan, selection, repeat)?;
        print!("{}{}", lines(&report), prediction.replacen("time      ", "predicted        ", 1));
        self.common.write(&report.json())
    }
}

impl Args {
    fn request(&self, small: bool) -> Result<Request> {
        let (model, sequence_tokens, chunk_tokens) = if small { ("tiny", 2048, 512) } else { ("qwen2.5-7b", 16_384, 8192) };
        let (chunk_tokens, page_tokens) = (self.chunk_tokens.unwrap_or(chunk_tokens), self.page_tokens);
        ensure!(
            chunk_tokens.is_multiple_of(page_tokens),
            "--chunk-tokens {chunk_tokens} is not a multiple of --page-tokens {page_tokens}"
        );
        ensure!((1..=64).contains(&self.group_pages), "--group-pages: wanted 1 to 64, got {}", self.group_pages);
        ensure!(self.sequences > 0 && self.repeat > 0, "--sequences and --repeat must be above 0");
        let keep = match self.keep {
            Keep::Auto => None,
            Keep::Inputs => Some(activations::Keep::Inputs),
            Keep::Attention => Some(activations::Keep::Attention),
            Keep::Mlp => Some(activations::Keep::Mlp),
            Keep::All => Some(activations::Keep::All),
        };
        Ok(Request {
            model: shape(self.model.as_deref().unwrap_or(model))?,
            sequence_tokens: self.sequence_tokens.unwrap_or(sequence_tokens),
            sequences_per_step: self.sequences,
            chunk_tokens,
            page_tokens,
            group_pages: self.group_pages,
            prefetch_groups: self.prefetch_groups,
            loss_tile_tokens: self.loss_tile_tokens,
            device_budget: self.device_budget,
            keep_budget: self.keep_budget,
            keep_host_budget: self.keep_host_budget,
            grad_dtype: self.grad_dtype.dtype(),
            lora: None,
            training: Some(Training { keep, optimizer: self.optimizer == Optimizer::Adamw }),
            optimizer_state: run::state_request(self.optimizer_state, self.master_weights, self.optimizer_placement),
        })
    }
}

/// What the state is, and at which rate an update goes through it.
fn optimizer_words(report: &StepReport) -> String {
    let (Some(words), Some(timing)) = (report.plan.optimizer_words(), report.update) else { return "none".to_owned() };
    let rate = report.plan.update_bytes() as f64 / timing.median / 1e9;
    format!("{words}; update {:.3} s, {rate:.1} GB/s", timing.median)
}

fn lines(report: &StepReport) -> String {
    let (plan, request) = (&report.plan, &report.plan.request);
    let [median, slowest, fastest] = report.tokens_per_second();
    let rate = report.flops / report.timing.median / 1e12;
    let share = report.share().map_or("-".to_owned(), |share| format!("{:.1} %", 100.0 * share));
    let layout = plan.layout;
    let streams = layout.resident_groups < layout.shape.num_groups();
    let pages = if streams {
        let (resident, all) = (layout.resident_groups, layout.shape.num_groups());
        format!("{resident} of {all} groups of each layer on the device, the others stream")
    } else {
        "all on the device".to_owned()
    };
    let keep = plan.keep.map_or("-".to_owned(), |keep| format!("{keep:?}").to_lowercase());
    let allocated = report.allocated_bytes + plan.machine.workspace_bytes;
    let count = |count: f64| format_count(count.round() as u64);
    let hits = report
        .traffic
        .hit_rate()
        .map_or_else(String::new, |rate| format!("; of the pages read {:.1} % were on the device", 100.0 * rate));
    let in_use = match plan.machine.shared {
        true => String::new(),
        false => format!(", in use by all programs {}", Bytes(report.in_use_bytes)),
    };
    [
        format!("device           {} ({})", report.device, report.hardware),
        format!("step             {} x {} tokens", request.sequences_per_step, format_count(request.sequence_tokens as u64)),
        format!("chunk            {} tokens, keep {keep}{}", format_count(request.chunk_tokens as u64), plan.kept_words()),
        format!("pages            {pages}"),
        format!("optimizer        {}", optimizer_words(report)),
        format!("tokens/s         {} (min {}, max {})", count(median), count(slowest), count(fastest)),
        format!("model FLOP/s     {rate:.2} TFLOP/s, of the ceiling {share}"),
        format!("device memory    planned {}, allocated {}{in_use}", Bytes(plan.device_bytes()), Bytes(allocated)),
        format!("host memory      planned {}, pinned {}", Bytes(plan.bytes(Tier::Host)), Bytes(report.pinned_bytes)),
        format!("moved per step   in {}, out {}{hits}", Bytes(report.traffic.in_bytes), Bytes(report.traffic.out_bytes)),
        format!("loss             {:.4}, gradient norm {:.4}", report.loss.loss, report.loss.grad_norm),
        String::new(),
    ]
    .join("\n")
}
