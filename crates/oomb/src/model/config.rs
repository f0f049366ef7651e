//! A model's shape and constants, whatever family it comes from.

use serde::{Deserialize, Serialize};

/// Architectures that share one layer; they differ in biases, QK norm and tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// `LlamaForCausalLM`.
    Llama,
    /// `Qwen2ForCausalLM`.
    Qwen2,
    /// `Qwen3ForCausalLM`.
    Qwen3,
}

/// Everything the model code needs to know of a checkpoint's `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Which `config.json` and tensor names.
    pub family: Family,
    /// V.
    pub vocab_size: usize,
    /// D.
    pub hidden_size: usize,
    /// F.
    pub intermediate_size: usize,
    /// L.
    pub num_layers: usize,
    /// H.
    pub num_heads: usize,
    /// G.
    pub num_kv_heads: usize,
    /// Dh.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// q, k, v projections have a bias (Qwen2).
    pub qkv_bias: bool,
    /// q and k are normed per head before the rotation (Qwen3).
    pub qk_norm: bool,
    /// The head is the embedding.
    pub tied_embeddings: bool,
    /// `max_position_embeddings` of the checkpoint: the context length the model says it supports.
    pub max_position_embeddings: usize,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
}

/// Rotary embedding as transformers defines it (`modeling_rope_utils`).
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// The scaling types of transformers. Lengths are in tokens; `original` is the context length before scaling, never the
/// one aimed at.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `default`.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware: the base grows with the sequence once it is longer than `original`.
    Dynamic {
        /// Scaling factor.
        factor: f64,
        /// Context length before scaling.
        original: usize,
    },
    /// By wavelength, three regimes.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// `low_freq_factor`.
        low_freq_factor: f64,
        /// `high_freq_factor`.
        high_freq_factor: f64,
        /// Context length before scaling.
        original: usize,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// Scaling factor.
        factor: f64,
        /// Factor on cos and sin where the checkpoint gives one.
        attention_factor: Option<f64>,
        /// Rotations above which a dimension is left alone.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f64,
        /// `mscale` and `mscale_all_dim`, where given.
        mscale: Option<(f64, f64)>,
        /// Whether the correction range is rounded to whole dimensions.
        truncate: bool,
        /// Context length before scaling.
        original: usize,
    },
}

impl ModelConfig {
    /// H · Dh, the width of attention's output.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// (H + 2G) · Dh, the width of the fused projection.
    pub fn qkv_width(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }
}
