//! Small random models and sequences, and engines over them.

use oomb::data::Sequence;
use oomb::engine::{Engine, machine};
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::model::config::{Family, ModelConfig, RopeConfig, RopeScaling};
use oomb::plan::optimizer::StateRequest;
use oomb::plan::{Plan, Request, Training};
use oomb::train;
use oomb_device::cpu::{Cpu, CpuOptions, Poison, Real};
use oomb_device::ops::loss::IGNORE;
use oomb_device::{Backend, DType};

/// SplitMix64: enough randomness for a test, the same everywhere.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A seed of this run's own, printed so that a failure can be repeated.
    pub fn fresh(test: &str) -> Self {
        let seed = std::env::var("OOMB_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock after 1970").as_nanos() as u64
        });
        eprintln!("{test}: OOMB_TEST_SEED={seed}");
        Self(seed)
    }
}

/// A model of odd sizes: bias and QK norm as asked for, GQA 4/2.
pub fn model(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: 37,
        hidden_size: 20,
        intermediate_size: 28,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        norm_eps: 1e-5,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        tied_embeddings: family == Family::Qwen2,
        max_position_embeddings: 64,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::None },
        initializer_range: 0.2,
    }
}

/// A sequence of `tokens` tokens in documents that start at `documents`.
pub fn sequence(random: &mut Random, tokens: usize, vocab: usize, documents: &[usize]) -> Sequence {
    let ids: Vec<u32> = (0..tokens).map(|_| random.below(vocab) as u32).collect();
    let start = |t: usize| documents.iter().rev().copied().find(|&start| start <= t).unwrap_or(0);
    let ends = |t: usize| t + 1 == tokens || documents.contains(&(t + 1));
    Sequence {
        labels: (0..tokens).map(|t| if ends(t) { IGNORE } else { ids[t + 1] }).collect(),
        positions: (0..tokens).map(|t| (t - start(t)) as u32).collect(),
        first: (0..tokens).map(|t| start(t) as u32).collect(),
        ids,
    }
}

/// Everything that must not change the result.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub chunk_tokens: usize,
    pub keep: Keep,
    /// Budget for pages and gradients together, in frames, or the smallest there is; `None`: all.
    pub frames: Option<usize>,
    pub group_pages: usize,
    pub prefetch_groups: usize,
    pub loss_tile_tokens: Option<usize>,
    pub grad_dtype: DType,
    /// For activations of more than one chunk.
    pub keep_budget: u64,
    /// The same in host memory.
    pub keep_host_budget: u64,
}

pub const PAGE: usize = 4;

impl Default for Setting {
    fn default() -> Self {
        Self {
            chunk_tokens: 1 << 20,
            keep: Keep::All,
            frames: None,
            group_pages: 2,
            prefetch_groups: 1,
            loss_tile_tokens: None,
            grad_dtype: DType::F32,
            keep_budget: 0,
            keep_host_budget: 0,
        }
    }
}

/// The request for `sequence_tokens` tokens under `setting`.
pub fn request(model: &ModelConfig, setting: Setting, sequence_tokens: usize, sequences: usize) -> Request {
    Request {
        model: model.clone(),
        sequence_tokens,
        sequences_per_step: sequences,
        chunk_tokens: setting.chunk_tokens.min(sequence_tokens.next_multiple_of(PAGE)),
        page_tokens: PAGE,
        group_pages: setting.group_pages,
        prefetch_groups: setting.prefetch_groups,
        loss_tile_tokens: setting.loss_tile_tokens,
        device_budget: None,
        keep_budget: Some(setting.keep_budget),
        keep_host_budget: Some(setting.keep_host_budget),
        grad_dtype: setting.grad_dtype,
        lora: None,
        training: Some(Training { keep: Some(setting.keep), optimizer: true }),
        optimizer_state: StateRequest::default(),
    }
}

/// An engine with random weights from `seed`, norms and biases included.
pub fn engine<B: Backend>(device: &B, request: &Request, frames: Option<usize>, selection: Selection, seed: u64) -> Engine<B> {
    let machine = machine(device, 1 << 34);
    let mut request = request.clone();
    if let Some(frames) = frames {
        let page = 2 * request.model.num_kv_heads * request.page_tokens * request.model.head_dim;
        let bytes = machine.bytes_of(machine.compute_dtype) + machine.bytes_of(request.grad_dtype);
        let budget = frames as u64 * (request.group_pages * page) as u64 * bytes;
        request.device_budget = Some(budget.max(request.smallest_budget(&machine)));
    }
    let plan = Plan::new(&request, &machine).expect("a small model fits");
    let mut engine = Engine::new(device, plan, selection).expect("memory");
    let config = engine.config.clone();
    engine.weights.randomise(device, &config, seed);
    for (index, view) in engine.weights.views.iter_mut().enumerate() {
        if view.shape().len() == 1 {
            device.fill_normal(view, 0.7, seed ^ (index as u64) << 7);
        }
    }
    train::start_optimizer(&mut engine);
    engine
}

/// Loss and all gradients.
pub struct Outcome {
    pub loss: f64,
    pub grads: Vec<f64>,
}

pub fn outcome<B: Backend>(engine: &mut Engine<B>, sequences: &[Sequence]) -> Outcome {
    let step = train::gradient(engine, sequences, 11).expect("the device works");
    let grads = engine.grads.as_ref().expect("an engine for training");
    Outcome { loss: step.loss, grads: engine.device.download_f64(&grads.slab).expect("the device works") }
}

pub fn cpu(real: Real) -> Cpu {
    Cpu::new(CpuOptions { real, poison: Poison::On, ..CpuOptions::default() })
}

/// `‖a - b‖ / ‖b‖`.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}
