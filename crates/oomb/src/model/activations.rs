//! The buffers of one chunk's activations and their gradients: what each layer keeps for its backward, and what all
//! layers share.

use super::config::ModelConfig;
use super::projection::AdapterBuffers;
use oomb_device::{Backend, DType, Tensor};
use serde::{Deserialize, Serialize};

/// What a chunk's forward keeps for its own backward; the rest is computed again, layer by layer, with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Layer inputs only.
    Inputs,
    /// Attention outputs and their log-sum-exp as well: attention is not done again.
    Attention,
    /// Everything but SwiGLU's output.
    All,
}

/// One buffer: name, dtype (`None`: the device's compute dtype), elements per token, and from which [`Keep`] on every
/// layer has its own.
type Buffer = (&'static str, Option<DType>, usize, Option<Keep>);

const INPUT: &str = "input";
const FINAL: &str = "output";
const ADAPTER_HIDDEN: &str = "adapter_hidden";
const D_ADAPTER_HIDDEN: &str = "d_adapter_hidden";

/// The buffers of a chunk, in order; `rank` is that of the adapters, where there are any.
fn buffers(config: &ModelConfig, train: bool, rank: Option<usize>) -> Vec<Buffer> {
    let (d, f, qkv, q, h) =
        (config.hidden_size, config.intermediate_size, config.qkv_width(), config.q_width(), config.num_heads);
    let f32 = Some(DType::F32);
    let mut buffers: Vec<Buffer> = vec![
        (INPUT, None, d, Some(Keep::Inputs)),
        (FINAL, None, d, None),
        ("attention_normed", None, d, Some(Keep::All)),
        ("attention_rstd", f32, 1, Some(Keep::All)),
        ("qkv", None, qkv, Some(Keep::All)),
        ("q", None, q, Some(Keep::All)),
        ("attended", None, q, Some(Keep::Attention)),
        ("lse", f32, h, Some(Keep::Attention)),
        ("middle", None, d, Some(Keep::All)),
        ("mlp_normed", None, d, Some(Keep::All)),
        ("mlp_rstd", f32, 1, Some(Keep::All)),
        ("gate_up", None, 2 * f, Some(Keep::All)),
        ("swiglu", None, f, None),
        ("attention_sum", f32, q, None),
        ("rope_table", f32, config.head_dim, None),
    ];
    if train {
        buffers.extend([
            ("d_hidden", None, d, None),
            ("d_normed", None, d, None),
            ("d_swiglu", None, f, None),
            ("d_attended", None, q, None),
            ("delta", f32, h, None),
        ] as [Buffer; 5]);
    }
    if let Some(rank) = rank {
        buffers.push((ADAPTER_HIDDEN, None, rank, None));
        buffers.extend(train.then_some((D_ADAPTER_HIDDEN, None, rank, None)));
    }
    buffers
}

/// Names, dtypes (`None`: the compute dtype) and shapes of a chunk's buffers: `[copies, T, width]`.
pub fn activation_shapes(
    config: &ModelConfig,
    chunk_tokens: usize,
    keep: Option<Keep>,
    rank: Option<usize>,
) -> Vec<(&'static str, Option<DType>, [usize; 3])> {
    let train = keep.is_some();
    buffers(config, train, rank)
        .into_iter()
        .map(|(name, dtype, width, from)| {
            let kept = keep.zip(from).is_some_and(|(keep, from)| keep >= from);
            (name, dtype, [if kept { config.num_layers } else { 1 }, chunk_tokens, width])
        })
        .collect()
}

/// A layer's buffers, `t` rows of each. A buffer that is not kept is the same for all layers.
#[derive(Clone)]
pub struct LayerActivations<B: Backend> {
    /// `[t, D]`.
    pub input: Tensor<B>,
    /// `[t, D]`: the next layer's input, or the last layer's output.
    pub output: Tensor<B>,
    /// `[t, D]`.
    pub attention_normed: Tensor<B>,
    /// `[t]` f32.
    pub attention_rstd: Tensor<B>,
    /// `[t, (H + 2G)·Dh]`, with bias, before norms and rotation; its own gradient after the layer's backward.
    pub qkv: Tensor<B>,
    /// `[t, H, Dh]`, rotated.
    pub q: Tensor<B>,
    /// `[t, H, Dh]`: attention's output.
    pub attended: Tensor<B>,
    /// `[t, H]` f32.
    pub lse: Tensor<B>,
    /// `[t, D]`: input + projected attention.
    pub middle: Tensor<B>,
    /// `[t, D]`.
    pub mlp_normed: Tensor<B>,
    /// `[t]` f32.
    pub mlp_rstd: Tensor<B>,
    /// `[t, 2F]`; its own gradient after the layer's backward.
    pub gate_up: Tensor<B>,
    /// `[t, F]`.
    pub swiglu: Tensor<B>,
    /// `[t, H, Dh]` f32: attention's carry in the forward, dq in the backward.
    pub attention_sum: Tensor<B>,
    /// `[t, Dh/2, 2]` f32.
    pub rope_table: Tensor<B>,
    /// Of the adapters, where there are any.
    pub adapters: Option<AdapterBuffers<B>>,
}

/// Gradients that all layers share, `t` rows of each.
#[derive(Clone)]
pub struct Gradients<B: Backend> {
    /// `[t, D]`: gradient of the residual stream, from a layer's output to its input.
    pub d_hidden: Tensor<B>,
    /// `[t, D]`: gradient of a norm's output.
    pub d_normed: Tensor<B>,
    /// `[t, F]`.
    pub d_swiglu: Tensor<B>,
    /// `[t, H, Dh]`.
    pub d_attended: Tensor<B>,
    /// `[t, H]` f32.
    pub delta: Tensor<B>,
}

/// All buffers of a chunk.
pub struct Activations<B: Backend> {
    config: ModelConfig,
    rank: Option<usize>,
    /// What the layers keep; `None` where there is no backward.
    pub keep: Option<Keep>,
    buffers: Vec<(&'static str, Tensor<B>)>,
}

impl<B: Backend> Activations<B> {
    /// Takes the buffers from `take`, which is asked for each name of [`activation_shapes`] in order.
    pub fn new(
        config: &ModelConfig,
        keep: Option<Keep>,
        rank: Option<usize>,
        mut take: impl FnMut(&'static str) -> Tensor<B>,
    ) -> Self {
        let names = buffers(config, keep.is_some(), rank).into_iter().map(|(name, ..)| name);
        Self { config: config.clone(), rank, keep, buffers: names.map(|name| (name, take(name))).collect() }
    }

    fn rows(&self, name: &str, layer: usize, tokens: usize) -> Tensor<B> {
        let found = self.buffers.iter().find(|(known, _)| *known == name);
        let (_, buffer) = found.unwrap_or_else(|| panic!("no activation buffer {name}"));
        buffer.index(layer % buffer.rows()).narrow(0..tokens)
    }

    /// The buffers of `layer` for a chunk of `tokens` tokens.
    pub fn layer(&self, layer: usize, tokens: usize) -> LayerActivations<B> {
        let (heads, dim) = (self.config.num_heads, self.config.head_dim);
        let rows = |name| self.rows(name, layer, tokens);
        let by_head = |name| rows(name).reshape(&[tokens, heads, dim]);
        let vector = |name| rows(name).reshape(&[tokens]);
        let last = layer + 1 == self.config.num_layers;
        let d_adapter_hidden = self.keep.map(|_| D_ADAPTER_HIDDEN);
        let adapters = self.rank.map(|_| AdapterBuffers { hidden: rows(ADAPTER_HIDDEN), d_hidden: d_adapter_hidden.map(rows) });
        LayerActivations {
            input: rows(INPUT),
            output: if last { rows(FINAL) } else { self.rows(INPUT, layer + 1, tokens) },
            attention_normed: rows("attention_normed"),
            attention_rstd: vector("attention_rstd"),
            qkv: rows("qkv"),
            q: by_head("q"),
            attended: by_head("attended"),
            lse: rows("lse"),
            middle: rows("middle"),
            mlp_normed: rows("mlp_normed"),
            mlp_rstd: vector("mlp_rstd"),
            gate_up: rows("gate_up"),
            swiglu: rows("swiglu"),
            attention_sum: by_head("attention_sum"),
            rope_table: rows("rope_table").reshape(&[tokens, dim / 2, 2]),
            adapters,
        }
    }

    /// The shared gradients for a chunk of `tokens` tokens.
    pub fn gradients(&self, tokens: usize) -> Gradients<B> {
        let rows = |name| self.rows(name, 0, tokens);
        Gradients {
            d_hidden: rows("d_hidden"),
            d_normed: rows("d_normed"),
            d_swiglu: rows("d_swiglu"),
            d_attended: rows("d_attended").reshape(&[tokens, self.config.num_heads, self.config.head_dim]),
            delta: rows("delta"),
        }
    }
}
