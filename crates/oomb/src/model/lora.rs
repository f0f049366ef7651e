//! Low-rank adapters (LoRA, arXiv 2106.09685): which projections have one, their parameters as PEFT names them, and how they
//! start. It must not know tensors or files.

use super::config::ModelConfig;
use super::params::{LayerParam, ParamId, ParamSpec, param_specs};
use crate::random::Random;
use std::ops::Range;

/// A projection that can have an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
}

/// Every projection: PEFT's `"all-linear"`.
pub const ALL_LINEAR: [Target; 7] = [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down];

impl Target {
    /// The module's name, as PEFT's `target_modules` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// The module of that name.
    pub fn parse(name: &str) -> Option<Self> {
        ALL_LINEAR.into_iter().find(|target| target.name() == name)
    }

    /// Where it is in a layer: `"self_attn.q_proj"`.
    pub fn path(self) -> String {
        let block = if self < Self::Gate { "self_attn" } else { "mlp" };
        format!("{block}.{}", self.name())
    }

    /// The parameter whose rows it is.
    pub fn param(self) -> LayerParam {
        match self {
            Self::Q | Self::K | Self::V => LayerParam::Qkv,
            Self::O => LayerParam::Output,
            Self::Gate | Self::Up => LayerParam::GateUp,
            Self::Down => LayerParam::Down,
        }
    }

    /// Which rows of [`Self::param`]: the projection's outputs.
    pub fn rows(self, config: &ModelConfig) -> Range<usize> {
        let (q, kv, f, d) =
            (config.q_width(), config.num_kv_heads * config.head_dim, config.intermediate_size, config.hidden_size);
        match self {
            Self::Q => 0..q,
            Self::K => q..q + kv,
            Self::V => q + kv..q + 2 * kv,
            Self::Gate => 0..f,
            Self::Up => f..2 * f,
            Self::O | Self::Down => 0..d,
        }
    }

    /// Width of its input.
    pub fn inputs(self, config: &ModelConfig) -> usize {
        match self {
            Self::O => config.q_width(),
            Self::Down => config.intermediate_size,
            _ => config.hidden_size,
        }
    }
}

/// The two factors of an adapter: `x` becomes `scale · b (a x)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Factor {
    /// `[r, inputs]`.
    A,
    /// `[outputs, r]`.
    B,
}

/// Adapters on the same projections of every layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// r, at least 1.
    pub rank: usize,
    /// The adapters' factor is `alpha / r`, or `alpha / √r` with [`Self::rslora`].
    pub alpha: f64,
    /// Rank-stabilised (arXiv 2312.03732).
    pub rslora: bool,
    /// In order, each once.
    pub targets: Vec<Target>,
}

impl LoraConfig {
    /// The factor on what an adapter adds.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }
}

/// The adapters' parameters in the order in which they lie in memory; tensors are named as PEFT names them.
pub fn lora_specs(config: &ModelConfig, lora: &LoraConfig) -> Vec<ParamSpec> {
    let spec = |layer: usize, target: Target, factor: Factor| {
        let (name, shape) = match factor {
            Factor::A => ("lora_A", vec![lora.rank, target.inputs(config)]),
            Factor::B => ("lora_B", vec![target.rows(config).len(), lora.rank]),
        };
        let source = format!("base_model.model.model.layers.{layer}.{}.{name}.weight", target.path());
        ParamSpec { id: ParamId::Layer(layer, LayerParam::Lora(target, factor)), sources: vec![(source, 0..shape[0])], shape }
    };
    let of_layer = |layer| {
        let both = move |target| [Factor::A, Factor::B].map(|factor| spec(layer, target, factor));
        lora.targets.iter().copied().flat_map(both)
    };
    (0..config.num_layers).flat_map(of_layer).collect()
}

/// The parameters that training changes: the adapters' where there are adapters, else the model's.
pub fn trained_specs(config: &ModelConfig, lora: Option<&LoraConfig>) -> Vec<ParamSpec> {
    lora.map_or_else(|| param_specs(config), |lora| lora_specs(config, lora))
}

/// What parameter number `index` of [`lora_specs`] starts from, as in PEFT: b is zero, so that training starts from the base;
/// a is uniform within `±1/√inputs` (torch's `kaiming_uniform_` with `a = √5`). Element `i` is a function of
/// `(seed, index, i)` alone: number `i` of the stream of `seed + index · 2^32`.
///
/// # Panics
/// If it is no parameter of an adapter.
pub fn initial_values(spec: &ParamSpec, index: usize, seed: u64) -> Vec<f32> {
    match spec.id {
        ParamId::Layer(_, LayerParam::Lora(_, Factor::B)) => vec![0.0; spec.len()],
        ParamId::Layer(_, LayerParam::Lora(_, Factor::A)) => {
            let bound = 1.0 / (spec.shape[1] as f64).sqrt();
            let mut random = Random::new(seed.wrapping_add((index as u64) << 32));
            (0..spec.len()).map(|_| (bound * (2.0 * random.unit() - 1.0)) as f32).collect()
        }
        id => panic!("{id:?} is no parameter of an adapter"),
    }
}
