//! How long a step takes: the FLOP and bytes of its parts over rates that a device was measured to reach. It must not know a device,
//! nor where rates are kept.
//!
//! Products take 2 FLOP per weight and token forward, 2 for the gradient of their input, 2 for that of their weight; attention takes
//! `4·Dh·H` per visible pair forward and `10·Dh·H` backward; what pass 2 computes again is `recomputed`'s. Elementwise ops move the
//! bytes of their arguments. Copies between host and device lie under all this as far as they take no longer.

use super::{Plan, Tier, chunk_tokens};
use crate::kv::select::Selection;
use crate::model::params::{ParamId, ParamSpec, param_specs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// FLOP per second of attention, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Of a chunk over itself, causal.
    pub diagonal: [f64; 2],
    /// Of a chunk over a long past.
    pub past: [f64; 2],
}

/// Rates that a device was measured to reach, per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// FLOP of products of a layer.
    pub products: f64,
    /// Attention's, by head dim.
    pub attention: BTreeMap<usize, AttentionRates>,
    /// Bytes that elementwise ops read and write.
    pub memory: f64,
    /// Bytes between host and device, each way.
    pub link: f64,
}

impl Rates {
    /// Those of the GPU that its driver calls `hardware`, as measured on one (docs/measurements.md); `None` where nothing was.
    pub fn built_in(hardware: &str) -> Option<Self> {
        let narrow = AttentionRates { diagonal: [431e12, 381e12], past: [434e12, 381e12] };
        let wide = AttentionRates { diagonal: [624e12, 506e12], past: [646e12, 574e12] };
        let attention = BTreeMap::from([(64, narrow), (128, wide)]);
        hardware.starts_with("NVIDIA H200").then_some(Self { products: 672e12, attention, memory: 3.9e12, link: 55e9 })
    }

    /// Whether they can be divided by.
    pub fn are_positive(&self) -> bool {
        let attention = self.attention.values().flat_map(|rates| rates.diagonal.iter().chain(&rates.past));
        !self.attention.is_empty() && attention.chain([&self.products, &self.memory, &self.link]).all(|rate| *rate > 0.0)
    }

    /// Attention's of the head dim that is nearest.
    fn attention_of(&self, head_dim: usize) -> AttentionRates {
        let nearest = self.attention.iter().min_by_key(|(dim, _)| dim.abs_diff(head_dim));
        *nearest.expect("rates of at least one head dim").1
    }
}

/// Seconds of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepTime {
    /// Products, the head's included.
    pub products: f64,
    /// Attention.
    pub attention: f64,
    /// Norms, rotation, SwiGLU, loss, and the gradient's norm.
    pub elementwise: f64,
    /// The update.
    pub optimizer: f64,
    /// Copies in the direction that takes longer, without the optimizer's.
    pub copies: f64,
}

impl StepTime {
    /// Of the whole step: copies lie under the rest.
    pub fn total(&self) -> f64 {
        (self.products + self.attention + self.elementwise).max(self.copies) + self.optimizer
    }
}

impl fmt::Display for StepTime {
    /// `11.2 s a step: products 6.1, attention 4.2, elementwise 0.6, optimizer 0.3 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { products, attention, elementwise, optimizer, copies } = self;
        write!(f, "{:.3} s a step: products {products:.3}, attention {attention:.3}", self.total())?;
        write!(f, ", elementwise {elementwise:.3}, optimizer {optimizer:.3}, copies under them {copies:.3} s")
    }
}

impl Plan {
    /// Seconds of a training step over sequences of full length; all zero for an evaluation.
    pub fn predict(&self, rates: &Rates, selection: Selection) -> StepTime {
        let (request, model) = (&self.request, &self.request.model);
        let Some(_) = self.keep else {
            return StepTime { products: 0.0, attention: 0.0, elementwise: 0.0, optimizer: 0.0, copies: 0.0 };
        };
        let steps = request.sequences_per_step as f64;
        let tokens = steps * request.sequence_tokens as f64;
        let passes = tokens / request.pass_tokens() as f64;
        let layers = model.num_layers as f64;
        let again = self.recomputed();

        // A head that is the embedding has no matrix of its own.
        let head = (model.vocab_size * model.hidden_size) as f64;
        let matrix = |spec: &ParamSpec| spec.is_matrix() && !matches!(spec.id, ParamId::Embed | ParamId::Head);
        let weights: f64 = param_specs(model).iter().filter(|spec| matrix(spec)).map(|spec| spec.len() as f64).sum();
        let trained = request.trained_elements() as f64;
        let forward = 2.0 * (weights + head) * tokens;
        let weight_gradients = if request.lora.is_some() { 4.0 * trained * tokens } else { forward };
        let flop = 2.0 * forward + weight_gradients + passes * again.products;

        // Each chunk reads and writes every matrix's gradient, each tile of the loss that of the head; a step's first only writes.
        let chunks = self.num_chunks() as f64;
        let tiles = chunks * (chunk_tokens(request) as f64 / self.loss_tile_tokens as f64).ceil();
        let gradient_bytes = match request.lora {
            Some(_) => 8.0 * trained * passes * chunks,
            None => 8.0 * (weights * (passes * chunks - 0.5) + head * (passes * tiles - 0.5)),
        };

        let pairs = selection.visible_pairs(request.sequence_tokens);
        let seen = pairs / Selection::All.visible_pairs(request.sequence_tokens);
        let own_tokens = request.chunk_tokens.min(request.sequence_tokens);
        let own = request.sequence_tokens as f64 / own_tokens as f64 * selection.visible_pairs(own_tokens);
        let per_pair = (model.q_width() * model.num_layers) as f64;
        let attend = rates.attention_of(model.head_dim);
        let attention = [(attend.diagonal, own), (attend.past, (pairs - own).max(0.0))]
            .map(|([forward, backward], pairs)| steps * per_pair * pairs * (4.0 / forward + 10.0 / backward));
        let attention = attention.iter().sum::<f64>() + passes * seen * again.attention / attend.past[0];

        // Per token and layer, in elements: norms, q, k, v and SwiGLU; then the same backward, with dq and the pages' gradients in f32.
        let [d, f, q, qkv] = [model.hidden_size, model.intermediate_size, model.q_width(), model.qkv_width()].map(|n| n as f64);
        let compute = self.machine.bytes_of(self.machine.compute_dtype) as f64;
        let forward_bytes = compute * (4.0 * d + 2.0 * qkv + 3.0 * f);
        let backward_bytes = compute * (12.0 * d + 2.0 * qkv + 2.0 * q + 6.0 * f) + 4.0 * (2.0 * q + (qkv - q));
        let share_again = passes * again.products / (2.0 * weights * tokens);
        let loss_bytes = 4.0 * compute * model.vocab_size as f64 * tokens;
        let layer_bytes = layers * tokens * (forward_bytes * (1.0 + share_again) + backward_bytes);
        let elementwise = (layer_bytes + loss_bytes + 4.0 * trained) / rates.memory;

        let update = self.update_bytes() as f64;
        let optimizer = match self.optimizer.map(|state| state.tier) {
            Some(Tier::Host) => update / 2.0 / rates.link,
            _ => update / rates.memory,
        };
        StepTime {
            products: flop / rates.products + gradient_bytes / rates.memory,
            attention,
            elementwise,
            optimizer,
            copies: passes * self.copied_bytes(seen) / rates.link,
        }
    }

    /// Bytes of one pass in the direction that carries more: pages that do not stay on the device come in for every chunk that sees them,
    /// forward and backward, then with their gradients, and gradients go out again; what chunks keep on the host goes once each way.
    fn copied_bytes(&self, seen: f64) -> f64 {
        let (request, model) = (&self.request, &self.request.model);
        let (num_chunks, tokens) = (self.num_chunks(), chunk_tokens(request) as f64);
        let resident = (self.layout.resident_groups * request.group_pages * request.page_tokens) as f64;
        let elements = (2 * model.num_kv_heads * model.head_dim * model.num_layers) as f64;
        let [kv, grads] =
            [self.machine.compute_dtype, request.grad_dtype].map(|dtype| elements * self.machine.bytes_of(dtype) as f64);
        let streamed = |chunk: usize| ((chunk + 1) as f64 * tokens - resident).max(0.0) * seen;
        let of_chunk = |chunk: usize| {
            let place = self.place(chunk, num_chunks);
            let last = chunk + 1 == num_chunks;
            let forwards = if last || place.set > 0 || place.attention.is_some() { 1.0 } else { 2.0 };
            streamed(chunk) * (forwards * kv + kv + grads)
        };
        let pages: f64 = (0..num_chunks).map(of_chunk).sum();
        let kept: u64 =
            self.buffers.iter().filter(|b| b.tier == Tier::Host && b.name.starts_with("activations.")).map(|b| b.bytes).sum();
        pages + kept as f64
    }

    /// Tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.request.sequences_per_step * self.request.sequence_tokens
    }
}

/// The largest chunk that is tried where the choice is the plan's.
const LARGEST_CHUNK: usize = 32_768;
/// The smallest.
const SMALLEST_CHUNK: usize = 1024;

impl super::Request {
    /// The plan of the chunk size, of all powers of two, that is predicted to be the fastest; the smaller of equals.
    ///
    /// # Errors
    /// As [`Plan::new`], of the smallest, if none fits.
    pub fn fastest(&self, machine: &super::Machine, rates: &Rates, selection: Selection) -> Result<Plan, super::DoesNotFit> {
        let sizes = std::iter::successors(Some(SMALLEST_CHUNK), |size| Some(2 * size)).take_while(|&size| size <= LARGEST_CHUNK);
        let longest = (self.sequence_tokens * self.sequences_per_step).next_power_of_two().max(SMALLEST_CHUNK);
        let sizes = sizes.filter(|size| *size <= longest && size.is_multiple_of(self.page_tokens));
        let plans: Vec<_> = sizes.map(|chunk_tokens| Plan::new(&Self { chunk_tokens, ..self.clone() }, machine)).collect();
        let seconds = |plan: &Plan| plan.predict(rates, selection).total();
        let fitting = plans.iter().filter_map(|plan| plan.as_ref().ok());
        match fitting.min_by(|a, b| seconds(a).total_cmp(&seconds(b))) {
            Some(best) => Ok(best.clone()),
            None => plans.into_iter().next().unwrap_or_else(|| Plan::new(self, machine)),
        }
    }
}
