//! Every buffer of a run by name, bytes and tier: what is allocated, what is printed, and what is refused before any
//! work. Arithmetic on configurations and page sizes; it must not know a device.

mod keep;
pub mod optimizer;
pub mod time;

use crate::config::{Bytes, format_count};
use crate::kv::{KvLayout, KvShape};
use crate::model::activations::{Keep, Kept, activation_shapes, host_shapes};
use crate::model::config::ModelConfig;
use crate::model::lora::{LoraConfig, trained_specs};
use crate::model::params::{ParamSpec, param_specs};
use crate::model::weights::slab_layout;
use oomb_device::DType;
use optimizer::{State, StateRequest};
use std::fmt;

/// Where a buffer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Device memory.
    Device,
    /// Page-locked host memory.
    Host,
}

/// One allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Unique in the plan: `"kv.pages"`.
    pub name: String,
    /// Where.
    pub tier: Tier,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Exactly what is allocated.
    pub bytes: u64,
}

/// What is known of the machine a plan is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// As the user would name it: `"cpu"`, `"cuda:0"`.
    pub device: String,
    /// Storage of weights, activations and pages.
    pub compute_dtype: DType,
    /// Bytes of an element of bf16, f32, f64, u32.
    pub element_bytes: [u64; 4],
    /// Device memory that may be used, bytes.
    pub device_memory: u64,
    /// Host memory that may be pinned, bytes.
    pub host_memory: u64,
    /// Device and host are the same memory (the CPU): both tiers together must fit `host_memory`.
    pub shared: bool,
    /// What the backend takes for itself, bytes of device memory.
    pub workspace_bytes: u64,
}

impl Machine {
    /// Bytes of one element here.
    pub fn bytes_of(&self, dtype: DType) -> u64 {
        let [bf16, f32, f64, u32] = self.element_bytes;
        match dtype {
            DType::Bf16 => bf16,
            DType::F32 => f32,
            DType::F64 => f64,
            DType::U32 => u32,
            DType::U8 => 1,
        }
    }
}

/// What a run wants; `None` leaves the choice to the plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The model's shape.
    pub model: ModelConfig,
    /// S: the longest sequence.
    pub sequence_tokens: usize,
    /// Sequences of one optimizer step.
    pub sequences_per_step: usize,
    /// T.
    pub chunk_tokens: usize,
    /// P.
    pub page_tokens: usize,
    /// Pages that move together.
    pub group_pages: usize,
    /// Groups whose copies start ahead of their use.
    pub prefetch_groups: usize,
    /// Tokens whose logits exist at once.
    pub loss_tile_tokens: Option<usize>,
    /// Bytes of device memory for pages and their gradients.
    pub device_budget: Option<u64>,
    /// Bytes of device memory for activations of more chunks than one; `None`: what is left, on a device with memory of its own.
    pub keep_budget: Option<u64>,
    /// The same of page-locked host memory.
    pub keep_host_budget: Option<u64>,
    /// Storage of dk, dv.
    pub grad_dtype: DType,
    /// Adapters beside frozen weights: only they have gradients and optimizer state.
    pub lora: Option<LoraConfig>,
    /// Training, and what is kept; evaluation otherwise.
    pub training: Option<Training>,
    /// Of the optimizer, where there is one.
    pub optimizer_state: StateRequest,
}

/// What training adds to a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Training {
    /// What a chunk keeps for its backward.
    pub keep: Option<Keep>,
    /// AdamW's moments and master weights.
    pub optimizer: bool,
}

/// A run's memory, decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What was asked for.
    pub request: Request,
    /// What it is for.
    pub machine: Machine,
    /// What chunks keep; `None` in an evaluation.
    pub keep: Option<Keep>,
    /// What is kept of other chunks than the one in work.
    pub kept: Kept,
    /// The optimizer's state; `None` where nothing is updated.
    pub optimizer: Option<State>,
    /// Tokens of a loss tile.
    pub loss_tile_tokens: usize,
    /// Where pages live.
    pub layout: KvLayout,
    /// Every allocation.
    pub buffers: Vec<Buffer>,
}

/// Why a run cannot be started, with the sum and the knobs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct DoesNotFit {
    /// Several lines for a terminal.
    pub message: String,
    /// The smallest plan that was tried.
    pub smallest: Box<Plan>,
}

/// Where the tile is not given, its logits take this much, or a hundredth of the device's memory where that is more, and it has so many
/// tokens at most: fewer tiles write the head's gradient less often.
const TILE_BYTES: u64 = 512 << 20;
const TILE_SHARE: u64 = 100;
const TILE_TOKENS: usize = 4096;

impl Request {
    /// Tokens that go through the two passes together: a sequence, or as many of a training step as fit one chunk.
    pub fn pass_tokens(&self) -> usize {
        let most = if self.training.is_some() { self.sequences_per_step.max(1) } else { 1 };
        (self.chunk_tokens / self.sequence_tokens).clamp(1, most) * self.sequence_tokens
    }

    /// The least that [`Self::device_budget`] can be: a chunk's own pages of one layer, the group in use, and those under
    /// way; bytes.
    pub fn smallest_budget(&self, machine: &Machine) -> u64 {
        self.shape().min_frames(self.prefetch_groups) as u64 * self.frame_bytes(machine)
    }

    /// What the optimizer's state may be, in the order in which it is tried; `None` alone where there is none.
    fn optimizer_states(&self, machine: &Machine) -> Vec<Option<State>> {
        if !self.training.is_some_and(|training| training.optimizer) {
            return vec![None];
        }
        self.optimizer_state.candidates(machine, self.trained_elements()).into_iter().map(Some).collect()
    }

    /// Elements of the slab of what is trained.
    fn trained_elements(&self) -> usize {
        slab_layout(&trained_specs(&self.model, self.lora.as_ref())).0
    }

    /// The most that [`Self::device_budget`] has a use for: all pages and their gradients; bytes.
    pub fn largest_budget(&self, machine: &Machine) -> u64 {
        self.shape().all_frames() as u64 * self.frame_bytes(machine)
    }

    fn shape(&self) -> KvShape {
        KvShape {
            num_layers: self.model.num_layers,
            num_pages: self.pass_tokens().div_ceil(self.page_tokens),
            chunk_pages: self.chunk_tokens / self.page_tokens,
            group_pages: self.group_pages,
        }
    }

    /// Bytes of one frame of pages and, in training, of their gradients.
    fn frame_bytes(&self, machine: &Machine) -> u64 {
        let elements: usize = self.page_shape(self.group_pages).iter().product();
        let grads = self.training.map_or(0, |_| machine.bytes_of(self.grad_dtype));
        elements as u64 * (machine.bytes_of(machine.compute_dtype) + grads)
    }

    fn page_shape(&self, slots: usize) -> [usize; 5] {
        [slots, 2, self.model.num_kv_heads, self.page_tokens, self.model.head_dim]
    }
}

fn too_small(budget: u64, smallest: u64, request: &Request) -> String {
    format!(
        "kv.device_budget = {} is too small: a chunk of {} tokens needs its own pages of one layer, the group in use and {} \
         on their way on the device, {} in all\nset kv.device_budget = \"{}KiB\" or more, or take smaller chunks or groups \
         (schedule.chunk_tokens, kv.group_pages, kv.prefetch_groups)",
        Bytes(budget),
        request.chunk_tokens,
        request.prefetch_groups,
        Bytes(smallest),
        smallest.div_ceil(1 << 10),
    )
}

impl Plan {
    /// Decides everything that `request` leaves open: the most exact optimizer state that fits ([`StateRequest`]); with it, for
    /// each [`Keep`], as many pages on the device as there is room for beside a chunk's activations (the rest lives on the host),
    /// and what else to keep; then the [`Keep`] after which least is computed again.
    pub fn new(request: &Request, machine: &Machine) -> Result<Self, DoesNotFit> {
        let smallest_budget = request.smallest_budget(machine);
        if let Some(budget) = request.device_budget.filter(|&budget| budget < smallest_budget) {
            let smallest = Self::with(&Request { device_budget: Some(smallest_budget), ..request.clone() }, machine, None, None);
            return Err(DoesNotFit { message: too_small(budget, smallest_budget, request), smallest: Box::new(smallest) });
        }
        let keeps = match request.training {
            None => vec![None],
            Some(Training { keep: Some(keep), .. }) => vec![Some(keep)],
            Some(Training { keep: None, .. }) => [Keep::All, Keep::Mlp, Keep::Attention, Keep::Inputs].map(Some).to_vec(),
        };
        let mut smallest: Option<Self> = None;
        for state in request.optimizer_states(machine) {
            let plans: Vec<_> = keeps.iter().map(|&keep| Self::with(request, machine, keep, state)).collect();
            let fitting = plans.iter().filter(|plan| plan.shortfall() == 0);
            if let Some(best) = fitting.min_by(|a, b| a.recomputed().flop().total_cmp(&b.recomputed().flop())) {
                return Ok(best.clone());
            }
            // Of equals the last: it holds least.
            smallest = smallest.into_iter().chain(plans).rev().min_by_key(Self::shortfall);
        }
        let smallest = smallest.expect("at least one way to keep activations was tried");
        Err(DoesNotFit { message: smallest.refusal(), smallest: Box::new(smallest) })
    }

    /// Parameters that training changes, and those of the model.
    pub fn num_parameters(&self) -> [usize; 2] {
        let count = |specs: Vec<ParamSpec>| specs.iter().map(ParamSpec::len).sum();
        let (model, lora) = (&self.request.model, self.request.lora.as_ref());
        [count(trained_specs(model, lora)), count(param_specs(model))]
    }

    /// Bytes of one tier, without the backend's workspace.
    pub fn bytes(&self, tier: Tier) -> u64 {
        self.buffers.iter().filter(|buffer| buffer.tier == tier).map(|buffer| buffer.bytes).sum()
    }

    /// Bytes of device memory, workspace included.
    pub fn device_bytes(&self) -> u64 {
        self.bytes(Tier::Device) + self.machine.workspace_bytes
    }

    /// Bytes by which the plan exceeds the machine; 0 where it fits.
    pub fn shortfall(&self) -> u64 {
        let (device, host) = (self.device_bytes(), self.bytes(Tier::Host));
        if self.machine.shared {
            return (device + host).saturating_sub(self.machine.host_memory);
        }
        device.saturating_sub(self.machine.device_memory) + host.saturating_sub(self.machine.host_memory)
    }

    /// The buffer of that name.
    ///
    /// # Panics
    /// If the plan has none.
    pub fn buffer(&self, name: &str) -> &Buffer {
        let found = self.buffers.iter().find(|buffer| buffer.name == name);
        found.unwrap_or_else(|| panic!("the plan has no buffer {name}"))
    }

    fn with(request: &Request, machine: &Machine, keep: Option<Keep>, optimizer: Option<State>) -> Self {
        let tile = request.loss_tile_tokens.unwrap_or_else(|| {
            let row_bytes = request.model.vocab_size as u64 * machine.bytes_of(machine.compute_dtype);
            let rows = (TILE_BYTES.max(machine.device_memory / TILE_SHARE) / row_bytes).clamp(1, 1 << 20) as usize;
            (1 << rows.ilog2()).min(TILE_TOKENS)
        });
        let loss_tile_tokens = tile.min(chunk_tokens(request));
        let shape = request.shape();
        let whole = KvLayout::new(shape, shape.all_frames(), request.prefetch_groups).expect("all frames are enough");
        let (request, machine) = (request.clone(), machine.clone());
        let kept = Kept::default();
        let mut plan = Self { request, machine, keep, kept, optimizer, loss_tile_tokens, layout: whole, buffers: Vec::new() };
        plan.buffers = plan.table();
        let frame_bytes = plan.request.frame_bytes(&plan.machine);
        let paged = frame_bytes * whole.num_frames as u64;
        let budget = match plan.request.device_budget {
            Some(budget) => budget,
            None if plan.machine.shared => paged,
            None => (plan.machine.device_memory + paged).saturating_sub(plan.device_bytes()),
        };
        if budget < paged {
            let frames = (budget / frame_bytes) as usize;
            let frames = frames.max(shape.min_frames(plan.request.prefetch_groups));
            plan.layout = KvLayout::new(shape, frames, plan.request.prefetch_groups).expect("at least the smallest ring");
            plan.buffers = plan.table();
        }
        plan.keep_more();
        plan
    }

    fn table(&self) -> Vec<Buffer> {
        let (request, model, compute) = (&self.request, &self.request.model, self.machine.compute_dtype);
        let mut table = Table { machine: &self.machine, buffers: Vec::new() };
        let (elements, _) = slab_layout(&param_specs(model));
        table.device("weights", compute, &[elements]);
        let trained = request.trained_elements();
        if request.lora.is_some() {
            table.device("adapter", compute, &[trained]);
        }
        if request.training.is_some() {
            table.device("gradients", DType::F32, &[trained]);
            table.device("gradient_norm", DType::F64, &[1]);
        }
        for (name, tier, dtype, shape) in self.optimizer.iter().flat_map(|state| state.buffers(&self.machine, trained)) {
            table.add(name, tier, dtype, &shape);
        }
        let rank = request.lora.as_ref().map(|lora| lora.rank);
        for (name, dtype, shape) in activation_shapes(model, chunk_tokens(request), self.keep, rank, self.kept) {
            table.device(&format!("activations.{name}"), dtype.unwrap_or(compute), &shape);
        }
        for (name, dtype, shape) in host_shapes(model, chunk_tokens(request), self.kept) {
            table.add(&format!("activations.{name}.host"), Tier::Host, dtype.unwrap_or(compute), &shape);
        }
        let tile = self.loss_tile_tokens;
        table.device("head.normed", compute, &[tile, model.hidden_size]);
        table.device("head.rstd", DType::F32, &[tile]);
        table.device("head.logits", compute, &[tile, model.vocab_size]);
        for name in ["ids", "labels", "positions", "first"] {
            table.device(&format!("sequence.{name}"), DType::U32, &[request.pass_tokens()]);
        }
        table.device("sequence.losses", DType::F32, &[request.sequences_per_step, request.pass_tokens()]);
        table.device("sequence.inv_freq", DType::F64, &[model.head_dim / 2]);
        let (slots, host_slots) = (self.layout.device_slots(), self.layout.host_slots());
        let mut kinds = vec![("kv.pages", compute)];
        kinds.extend(self.keep.map(|_| ("kv.gradients", request.grad_dtype)));
        for (name, dtype) in kinds {
            table.device(name, dtype, &request.page_shape(slots));
            if host_slots > 0 {
                table.add(&format!("{name}.host"), Tier::Host, dtype, &request.page_shape(host_slots));
            }
        }
        table.buffers
    }

    fn refusal(&self) -> String {
        let machine = &self.machine;
        let (device, host) = (self.device_bytes(), self.bytes(Tier::Host));
        let have = if machine.shared {
            let sum = format!("{} in all, {} are available", Bytes(device + host), Bytes(machine.host_memory));
            format!("it needs {} for the device and {} pinned on the host: {sum}", Bytes(device), Bytes(host))
        } else {
            let device = format!("{} of device memory ({} available)", Bytes(device), Bytes(machine.device_memory));
            format!("it needs {device} and {} of pinned host memory ({} available)", Bytes(host), Bytes(machine.host_memory))
        };
        let mut largest: Vec<_> = self.buffers.iter().collect();
        largest.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes));
        let named = |buffer: &&Buffer| format!("{} {}", buffer.name, Bytes(buffer.bytes));
        let largest: Vec<_> = largest.iter().take(4).map(named).collect();
        let knobs = self.knobs();
        let advice = if knobs.is_empty() {
            "no single setting makes it fit: take a smaller model, or a larger machine".to_owned()
        } else {
            format!("it fits with {}", knobs.join(", or with "))
        };
        format!("this run does not fit {}: {have}\nlargest: {}\n{advice}", machine.device, largest.join(", "))
    }

    /// Single changes that make the run fit, the mildest first.
    fn knobs(&self) -> Vec<String> {
        let mut knobs = Vec::new();
        let mut attempt = |words: String, change: &dyn Fn(&mut Request)| {
            let mut request = self.request.clone();
            change(&mut request);
            let keep = request.training.map(|training| training.keep.unwrap_or(Keep::Inputs));
            let with = |state| Self::with(&request, &self.machine, keep, state).shortfall() == 0;
            let fits = request != self.request && request.optimizer_states(&self.machine).into_iter().any(with);
            if fits {
                knobs.push(words);
            }
            fits
        };
        attempt("kv.device_budget = \"auto\"".to_owned(), &|request| request.device_budget = None);
        attempt("schedule.keep = \"auto\"".to_owned(), &|request| {
            if let Some(training) = &mut request.training {
                training.keep = None;
            }
        });
        attempt("optimizer.state_dtype, master_weights and placement = \"auto\"".to_owned(), &|request| {
            request.optimizer_state =
                StateRequest { piece_bytes: request.optimizer_state.piece_bytes, ..StateRequest::default() };
        });
        if self.machine.bytes_of(DType::Bf16) < self.machine.bytes_of(DType::F32) {
            attempt("kv.grad_dtype = \"bf16\"".to_owned(), &|request| request.grad_dtype = DType::Bf16);
        }
        let (mut chunk, page) = (self.request.chunk_tokens, self.request.page_tokens);
        while chunk / 2 >= page && (chunk / 2).is_multiple_of(page) {
            chunk /= 2;
            if attempt(format!("schedule.chunk_tokens = {chunk}"), &|request| request.chunk_tokens = chunk) {
                break;
            }
        }
        let mut tokens = self.request.sequence_tokens / 2;
        while tokens >= 2 && !attempt(format!("data.sequence_tokens = {tokens}"), &|request| request.sequence_tokens = tokens) {
            tokens /= 2;
        }
        knobs
    }
}

/// Rows of the activation buffers: what is shorter than a chunk needs no more than itself.
fn chunk_tokens(request: &Request) -> usize {
    request.chunk_tokens.min(request.pass_tokens())
}

struct Table<'a> {
    machine: &'a Machine,
    buffers: Vec<Buffer>,
}

impl Table<'_> {
    fn device(&mut self, name: &str, dtype: DType, shape: &[usize]) {
        self.add(name, Tier::Device, dtype, shape);
    }

    fn add(&mut self, name: &str, tier: Tier, dtype: DType, shape: &[usize]) {
        let bytes = shape.iter().map(|&dim| dim as u64).product::<u64>() * self.machine.bytes_of(dtype);
        self.buffers.push(Buffer { name: name.to_owned(), tier, dtype, shape: shape.to_vec(), bytes });
    }
}

impl fmt::Display for Plan {
    /// A table of every buffer, the sums, and what was decided.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.buffers.iter().map(|buffer| buffer.name.len()).max().unwrap_or(0);
        writeln!(f, "{:width$}  {:6}  {:5}  {:>12}  shape", "buffer", "tier", "dtype", "bytes")?;
        for buffer in &self.buffers {
            let tier = format!("{:?}", buffer.tier).to_lowercase();
            let dtype = format!("{:?}", buffer.dtype).to_lowercase();
            let bytes = Bytes(buffer.bytes).to_string();
            writeln!(f, "{:width$}  {tier:6}  {dtype:5}  {bytes:>12}  {:?}", buffer.name, buffer.shape)?;
        }
        if self.machine.workspace_bytes > 0 {
            let bytes = Bytes(self.machine.workspace_bytes).to_string();
            writeln!(f, "{:width$}  device  {:5}  {bytes:>12}", "workspace", "")?;
        }
        let (groups, total) = (self.layout.resident_groups, self.layout.shape.num_groups());
        let pages = if groups == total {
            "all on the device".to_owned()
        } else {
            format!("{groups} of {total} groups of each layer stay on the device, the others stream from the host")
        };
        writeln!(f)?;
        if let (Some(lora), Some(_)) = (&self.request.lora, self.keep) {
            let [trained, all] = self.num_parameters().map(|count| format_count(count as u64));
            let targets: Vec<_> = lora.targets.iter().map(|target| target.name()).collect();
            writeln!(f, "trained   {trained} beside {all} frozen parameters: rank {} on {}", lora.rank, targets.join(", "))?;
        }
        if let Some(keep) = self.keep {
            writeln!(f, "keep      {}{}", format!("{keep:?}").to_lowercase(), self.kept_words())?;
        }
        writeln!(f, "pages     {pages}")?;
        if let Some(words) = self.optimizer_words() {
            writeln!(f, "optimizer {words}")?;
        }
        let (device, host) = (Bytes(self.device_bytes()), Bytes(self.bytes(Tier::Host)));
        if self.machine.shared {
            writeln!(f, "memory    {} of {}", Bytes(device.0 + host.0), Bytes(self.machine.host_memory))
        } else {
            writeln!(f, "device    {device} of {}", Bytes(self.machine.device_memory))?;
            writeln!(f, "host      {host} of {}", Bytes(self.machine.host_memory))
        }
    }
}
