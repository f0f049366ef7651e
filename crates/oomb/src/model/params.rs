//! The list of a model's parameters: names, shapes, and which Hugging Face tensors make up which rows. Fused
//! projections are rows of one matrix, so that a checkpoint's tensors are runs of ours.

use super::config::ModelConfig;
use super::lora::{Factor, Target};
use std::ops::Range;

/// Which parameter of the model; layers count from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParamId {
    /// `[V, D]`.
    Embed,
    /// `[D]`, norm after the last layer.
    FinalNorm,
    /// `[V, D]`, absent where embeddings are tied.
    Head,
    /// A parameter of one layer.
    Layer(usize, LayerParam),
}

/// Parameters of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerParam {
    /// `[D]`.
    AttentionNorm,
    /// `[(H + 2G)·Dh, D]`, rows q, k, v.
    Qkv,
    /// `[(H + 2G)·Dh]`.
    QkvBias,
    /// `[Dh]`.
    QNorm,
    /// `[Dh]`.
    KNorm,
    /// `[D, H·Dh]`.
    Output,
    /// `[D]`.
    MlpNorm,
    /// `[2F, D]`, rows gate, up.
    GateUp,
    /// `[D, F]`.
    Down,
    /// A factor of an adapter, beside the model's own parameters.
    Lora(Target, Factor),
}

/// A parameter and the tensors of a checkpoint that fill it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Which.
    pub id: ParamId,
    /// Its shape here.
    pub shape: Vec<usize>,
    /// Hugging Face tensor names and the rows (of the first dimension) that each fills, in order, without gaps.
    pub sources: Vec<(String, Range<usize>)>,
}

impl ParamSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Never: a parameter has elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Norms and biases get no weight decay by default.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() == 2
    }
}

/// All parameters in the order in which they lie in memory: embedding, layers, final norm, head.
pub fn param_specs(config: &ModelConfig) -> Vec<ParamSpec> {
    let (d, v) = (config.hidden_size, config.vocab_size);
    let whole =
        |id, name: &str, shape: &[usize]| ParamSpec { id, shape: shape.to_vec(), sources: vec![(name.to_owned(), 0..shape[0])] };
    let mut specs = vec![whole(ParamId::Embed, "model.embed_tokens.weight", &[v, d])];
    for layer in 0..config.num_layers {
        specs.extend(layer_specs(config, layer));
    }
    specs.push(whole(ParamId::FinalNorm, "model.norm.weight", &[d]));
    if !config.tied_embeddings {
        specs.push(whole(ParamId::Head, "lm_head.weight", &[v, d]));
    }
    specs
}

fn layer_specs(config: &ModelConfig, layer: usize) -> Vec<ParamSpec> {
    use LayerParam::*;
    let (d, f, dh) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (q, kv) = (config.q_width(), config.num_kv_heads * dh);
    let named = |sources: &[(&str, usize)]| sources.iter().map(|&(name, rows)| (name.to_owned(), rows)).collect::<Vec<_>>();
    let spec = |param, shape: &[usize], sources: &[(String, usize)]| {
        let mut row = 0;
        let sources = sources
            .iter()
            .map(|(name, rows)| {
                row += rows;
                (format!("model.layers.{layer}.{name}"), row - rows..row)
            })
            .collect();
        ParamSpec { id: ParamId::Layer(layer, param), shape: shape.to_vec(), sources }
    };
    let qkv = [("q", q), ("k", kv), ("v", kv)];
    let weights = qkv.map(|(p, rows)| (format!("self_attn.{p}_proj.weight"), rows));
    let biases = qkv.map(|(p, rows)| (format!("self_attn.{p}_proj.bias"), rows));
    let mut specs = vec![spec(AttentionNorm, &[d], &named(&[("input_layernorm.weight", d)]))];
    specs.push(spec(Qkv, &[q + 2 * kv, d], &weights));
    if config.qkv_bias {
        specs.push(spec(QkvBias, &[q + 2 * kv], &biases));
    }
    if config.qk_norm {
        specs.push(spec(QNorm, &[dh], &named(&[("self_attn.q_norm.weight", dh)])));
        specs.push(spec(KNorm, &[dh], &named(&[("self_attn.k_norm.weight", dh)])));
    }
    specs.push(spec(Output, &[d, q], &named(&[("self_attn.o_proj.weight", d)])));
    specs.push(spec(MlpNorm, &[d], &named(&[("post_attention_layernorm.weight", d)])));
    specs.push(spec(GateUp, &[2 * f, d], &named(&[("mlp.gate_proj.weight", f), ("mlp.up_proj.weight", f)])));
    specs.push(spec(Down, &[d, f], &named(&[("mlp.down_proj.weight", d)])));
    specs
}
