//! The buffers of a chunk's activations and their gradients: what each layer keeps for its backward, what all layers
//! share, and what free memory keeps of more chunks than the one in work.

pub mod host;

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
    /// And what the MLP's norm and first product read and gave: only norms, q, k and v are computed again.
    Mlp,
    /// Everything but SwiGLU's output.
    All,
}

/// What is kept of other chunks than the one in work, so that pass 2 need not compute it again; latest chunks first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    /// Chunks that pass 1 leaves all their [`Keep`] buffers of.
    pub chunks: usize,
    /// Further chunks of which it leaves attention's outputs.
    pub attention: Tiers,
    /// How many of those also keep their layers' inputs and the last one's output: pass 2 then needs no forward of them, only
    /// what [`Keep::Attention`] computes again within each layer.
    pub inputs: Tiers,
}

/// How many chunks keep something where: the latest on the device, those before them on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiers {
    /// In device memory.
    pub device: usize,
    /// In page-locked host memory.
    pub host: usize,
}

impl Tiers {
    /// In either.
    pub fn total(self) -> usize {
        self.device + self.host
    }

    /// Where the chunk of that number has its own.
    pub fn stored(self, index: usize) -> Option<Stored> {
        if index < self.device {
            return Some(Stored::Device(index));
        }
        (index < self.total()).then(|| Stored::Host(index - self.device))
    }
}

/// A place that lasts from pass 1 to pass 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// In buffers of its own.
    Device(usize),
    /// In host memory; in the buffers of set 0 while it is in work.
    Host(usize),
}

/// Where a chunk's activations are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// Which set of buffers: 0 for chunks that are recomputed, others keep theirs from pass 1.
    pub set: usize,
    /// Where its attention outputs are kept, if they are.
    pub attention: Option<Stored>,
    /// Where its layers' inputs and its output are kept, if they are.
    pub inputs: Option<Stored>,
}

/// One buffer: name, dtype (`None`: the device's compute dtype), elements per token, and from which [`Keep`] on every
/// layer has its own.
type Buffer = (&'static str, Option<DType>, usize, Option<Keep>);

const INPUT: &str = "input";
const FINAL: &str = "output";
const ATTENDED: &str = "attended";
const LSE: &str = "lse";
const KEPT_INPUT: &str = "kept_input";
const KEPT_OUTPUT: &str = "kept_output";
const KEPT_ATTENDED: &str = "kept_attended";
const KEPT_LSE: &str = "kept_lse";
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
        (ATTENDED, None, q, Some(Keep::Attention)),
        (LSE, f32, h, Some(Keep::Attention)),
        ("middle", None, d, Some(Keep::Mlp)),
        ("mlp_normed", None, d, Some(Keep::All)),
        ("mlp_rstd", f32, 1, Some(Keep::All)),
        ("gate_up", None, 2 * f, Some(Keep::Mlp)),
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

/// A buffer's name, dtype (`None`: the compute dtype) and shape: `[copies, T, width]`.
pub type ActivationShape = (&'static str, Option<DType>, [usize; 3]);

/// All buffers for chunks of `chunk_tokens`.
pub fn activation_shapes(
    config: &ModelConfig,
    chunk_tokens: usize,
    keep: Option<Keep>,
    rank: Option<usize>,
    kept: Kept,
) -> Vec<ActivationShape> {
    let (layers, sets) = (config.num_layers, 1 + kept.chunks);
    let mut shapes: Vec<ActivationShape> = buffers(config, keep.is_some(), rank)
        .into_iter()
        .map(|(name, dtype, width, from)| {
            let by_layer = keep.zip(from).is_some_and(|(keep, from)| keep >= from);
            let copies = if by_layer {
                layers * sets
            } else if name == FINAL {
                sets
            } else {
                1
            };
            (name, dtype, [copies, chunk_tokens, width])
        })
        .collect();
    shapes.extend(kept_shapes(config, chunk_tokens, [kept.inputs.device, kept.attention.device]));
    shapes
}

/// Buffers in host memory, for what chunks keep there.
pub fn host_shapes(config: &ModelConfig, chunk_tokens: usize, kept: Kept) -> Vec<ActivationShape> {
    kept_shapes(config, chunk_tokens, [kept.inputs.host, kept.attention.host])
}

/// What so many chunks keep of their inputs, and so many of attention.
fn kept_shapes(config: &ModelConfig, chunk_tokens: usize, [inputs, attention]: [usize; 2]) -> Vec<ActivationShape> {
    let (layers, d) = (config.num_layers, config.hidden_size);
    let all = [
        (KEPT_INPUT, None, [inputs * layers, chunk_tokens, d]),
        (KEPT_OUTPUT, None, [inputs, chunk_tokens, d]),
        (KEPT_ATTENDED, None, [attention * layers, chunk_tokens, config.q_width()]),
        (KEPT_LSE, Some(DType::F32), [attention * layers, chunk_tokens, config.num_heads]),
    ];
    all.into_iter().filter(|(_, _, [copies, ..])| *copies > 0).collect()
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

/// All buffers of chunks.
pub struct Activations<B: Backend> {
    config: ModelConfig,
    rank: Option<usize>,
    /// What the layers keep; `None` where there is no backward.
    pub keep: Option<Keep>,
    sets: usize,
    buffers: Vec<(&'static str, Tensor<B>)>,
}

impl<B: Backend> Activations<B> {
    /// Takes the buffers from `take`, which is asked for each name of [`activation_shapes`] in order.
    pub fn new(
        config: &ModelConfig,
        keep: Option<Keep>,
        rank: Option<usize>,
        kept: Kept,
        mut take: impl FnMut(&'static str) -> Tensor<B>,
    ) -> Self {
        let names = activation_shapes(config, 1, keep, rank, kept).into_iter().map(|(name, ..)| name);
        let buffers = names.map(|name| (name, take(name))).collect();
        Self { config: config.clone(), rank, keep, sets: 1 + kept.chunks, buffers }
    }

    fn buffer(&self, name: &str) -> &Tensor<B> {
        let found = self.buffers.iter().find(|(known, _)| *known == name);
        let (_, buffer) = found.unwrap_or_else(|| panic!("no activation buffer {name}"));
        buffer
    }

    /// Rows of a layer in a set, as far as the buffer knows layers and sets.
    fn rows(&self, name: &str, place: Place, layer: usize, tokens: usize) -> Tensor<B> {
        let buffer = self.buffer(name);
        let copy = match buffer.rows() {
            1 => 0,
            copies if copies == self.sets => place.set,
            copies => place.set * (copies / self.sets) + layer,
        };
        buffer.index(copy).narrow(0..tokens)
    }

    /// Rows of what a chunk may keep on its own: in their own place where it is kept on the device.
    fn kept_rows(
        &self,
        (name, kept): (&str, &str),
        stored: Option<Stored>,
        place: Place,
        layer: usize,
        tokens: usize,
    ) -> Tensor<B> {
        match stored {
            Some(Stored::Device(index)) if name == FINAL => self.buffer(kept).index(index).narrow(0..tokens),
            Some(Stored::Device(index)) => self.buffer(kept).index(index * self.config.num_layers + layer).narrow(0..tokens),
            _ => self.rows(name, place, layer, tokens),
        }
    }

    /// The buffers of `layer` for a chunk of `tokens` tokens.
    pub fn layer(&self, place: Place, layer: usize, tokens: usize) -> LayerActivations<B> {
        let (heads, dim) = (self.config.num_heads, self.config.head_dim);
        let rows = |name| self.rows(name, place, layer, tokens);
        let by_head = |name| rows(name).reshape(&[tokens, heads, dim]);
        let vector = |name| rows(name).reshape(&[tokens]);
        let input = |layer| self.kept_rows((INPUT, KEPT_INPUT), place.inputs, place, layer, tokens);
        let attention = |names| self.kept_rows(names, place.attention, place, layer, tokens);
        let last = layer + 1 == self.config.num_layers;
        let output =
            if last { self.kept_rows((FINAL, KEPT_OUTPUT), place.inputs, place, layer, tokens) } else { input(layer + 1) };
        let d_adapter_hidden = self.keep.map(|_| D_ADAPTER_HIDDEN);
        let adapters = self.rank.map(|_| AdapterBuffers { hidden: rows(ADAPTER_HIDDEN), d_hidden: d_adapter_hidden.map(rows) });
        LayerActivations {
            input: input(layer),
            output,
            attention_normed: rows("attention_normed"),
            attention_rstd: vector("attention_rstd"),
            qkv: rows("qkv"),
            q: by_head("q"),
            attended: attention((ATTENDED, KEPT_ATTENDED)).reshape(&[tokens, heads, dim]),
            lse: attention((LSE, KEPT_LSE)),
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
        let rows = |name| self.rows(name, Place::default(), 0, tokens);
        Gradients {
            d_hidden: rows("d_hidden"),
            d_normed: rows("d_normed"),
            d_swiglu: rows("d_swiglu"),
            d_attended: rows("d_attended").reshape(&[tokens, self.config.num_heads, self.config.head_dim]),
            delta: rows("delta"),
        }
    }
}
