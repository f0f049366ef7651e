//! Whole training steps of a model with random weights on random tokens: tokens per second, memory, and the share of the
//! arithmetic ceiling. It must not know data or checkpoints.

use super::{Ceilings, Timing};
use crate::data::Sequence;
use crate::engine::Engine;
use crate::kv::Traffic;
use crate::kv::select::Selection;
use crate::model::config::ModelConfig;
use crate::model::params::{ParamId, param_specs};
use crate::plan::Plan;
use crate::random::Random;
use crate::train::{self, StepLoss, Update};
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, Result};
use serde_json::{Value, json};
use std::time::Instant;

/// What is repeated, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repeat {
    /// Steps that are not counted: they compile, and touch memory for the first time.
    pub warm_up: usize,
    /// Steps that are.
    pub steps: usize,
    /// Of weights and tokens.
    pub seed: u64,
}

/// What steps took.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// As the user names it.
    pub device: String,
    /// As its driver names it.
    pub hardware: String,
    /// What was allocated, and why.
    pub plan: Plan,
    /// Of one step.
    pub timing: Timing,
    /// Of its update alone, where there is one.
    pub update: Option<Timing>,
    /// Of one step.
    pub tokens: usize,
    /// Of the last step.
    pub loss: StepLoss,
    /// Of one step; see [`model_flops`].
    pub flops: f64,
    /// Device bytes that the program allocated, without the backend's own.
    pub allocated_bytes: u64,
    /// Device bytes in use by this and all other programs, as the device itself says.
    pub in_use_bytes: u64,
    /// Page-locked host bytes that the program allocated.
    pub pinned_bytes: u64,
    /// Between host and device, in one step.
    pub traffic: Traffic,
}

/// Useful FLOP of a forward and backward pass over sequences of these lengths, however much is computed again.
///
/// * linears: 2 per weight and token forward, 4 backward; weights are all matrices but the embedding, the head included;
/// * attention: `4·Dh·H` per layer and visible pair forward, 8 backward (dq, dk, dv and the gradient of the weights; the
///   scores that a fused backward computes again do not count).
pub fn model_flops(config: &ModelConfig, selection: Selection, sequence_tokens: &[usize]) -> f64 {
    let matrices = param_specs(config).into_iter().filter(|spec| spec.is_matrix() && spec.id != ParamId::Embed);
    let tied_head = if config.tied_embeddings { config.vocab_size * config.hidden_size } else { 0 };
    let weights = matrices.map(|spec| spec.len()).sum::<usize>() + tied_head;
    let tokens: usize = sequence_tokens.iter().sum();
    let pairs: f64 = sequence_tokens.iter().map(|&tokens| selection.visible_pairs(tokens)).sum();
    6.0 * weights as f64 * tokens as f64 + 12.0 * (config.q_width() * config.num_layers) as f64 * pairs
}

/// Runs the planned step on `plan.request.sequences_per_step` sequences of full length; with an update where the plan has an
/// optimizer.
///
/// # Errors
/// Of the device.
///
/// # Panics
/// If the plan is for an evaluation.
pub fn run<B: Backend>(device: &B, plan: Plan, selection: Selection, repeat: Repeat) -> Result<StepReport> {
    let (model, tokens) = (plan.request.model.clone(), plan.request.sequence_tokens);
    let mut random = Random::new(repeat.seed);
    let sequences: Vec<_> = (0..plan.request.sequences_per_step)
        .map(|_| Sequence::packed((0..tokens).map(|_| random.below(model.vocab_size) as u32).collect(), &[0]))
        .collect();
    let mut engine = Engine::new(device, plan.clone(), selection)?;
    engine.weights.randomise(device, &model, repeat.seed);
    train::start_optimizer(&mut engine);
    device.synchronize()?;
    let (mut seconds, mut update_seconds) = (Vec::new(), Vec::new());
    let (mut last, mut traffic) = (None, Traffic::default());
    for step in 1..=repeat.warm_up + repeat.steps.max(1) {
        let (before, started) = (engine.traffic(), Instant::now());
        let loss = train::gradient(&mut engine, &sequences, repeat.seed.wrapping_add(step as u64))?;
        // The gradient's norm was waited for: what follows is the update alone.
        let updating = Instant::now();
        if engine.optimizer.is_some() {
            train::update(&mut engine, &update(step, repeat.seed));
        }
        device.synchronize()?;
        if step > repeat.warm_up {
            seconds.push(started.elapsed().as_secs_f64());
            update_seconds.push(updating.elapsed().as_secs_f64());
        }
        traffic = engine.traffic() - before;
        last = Some(loss);
    }
    let (total, free) = device.memory();
    Ok(StepReport {
        device: device.name(),
        hardware: device.hardware(),
        flops: model_flops(&model, selection, &vec![tokens; sequences.len()]),
        tokens: tokens * sequences.len(),
        plan,
        timing: Timing::of(seconds),
        update: engine.optimizer.as_ref().map(|_| Timing::of(update_seconds)),
        loss: last.expect("at least one step was run"),
        allocated_bytes: device.device_bytes(),
        in_use_bytes: total - free,
        pinned_bytes: device.pinned_bytes(),
        traffic,
    })
}

/// Customary numbers: their values do not change how long an update takes.
fn update(step: usize, seed: u64) -> Update {
    let step = u32::try_from(step).expect("steps fit 32 bits");
    let hyper = AdamW { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
    Update { hyper, clip_norm: Some(1.0), decay_norms_and_biases: false, seed: seed.wrapping_add(u64::from(step)) }
}

impl StepReport {
    /// Tokens per second: median, slowest and fastest step.
    pub fn tokens_per_second(&self) -> [f64; 3] {
        [self.timing.median, self.timing.max, self.timing.min].map(|seconds| self.tokens as f64 / seconds)
    }

    /// Useful FLOP per second over the device's ceiling, by the median.
    pub fn share(&self) -> Option<f64> {
        Ceilings::of(&self.hardware).map(|ceilings| self.flops / self.timing.median / ceilings.product)
    }

    /// Everything, with unrounded numbers.
    pub fn json(&self) -> Value {
        let request = &self.plan.request;
        let [median, min, max] = self.tokens_per_second();
        json!({
            "device": self.device,
            "hardware": self.hardware,
            "version": env!("CARGO_PKG_VERSION"),
            "sequence_tokens": request.sequence_tokens,
            "sequences": request.sequences_per_step,
            "chunk_tokens": request.chunk_tokens,
            "page_tokens": request.page_tokens,
            "keep": self.plan.keep,
            "optimizer": request.training.is_some_and(|training| training.optimizer),
            "optimizer_state": self.plan.optimizer_words(),
            "resident_groups": self.plan.layout.resident_groups,
            "groups": self.plan.layout.shape.num_groups(),
            "seconds": { "median": self.timing.median, "min": self.timing.min, "max": self.timing.max },
            "update_seconds": self.update.map(|timing| timing.median),
            "update_bytes": self.plan.update_bytes(),
            "tokens_per_second": { "median": median, "min": min, "max": max },
            "model_flop_per_second": self.flops / self.timing.median,
            "share": self.share(),
            "loss": self.loss.loss,
            "grad_norm": self.loss.grad_norm,
            "planned_device_bytes": self.plan.device_bytes(),
            "allocated_device_bytes": self.allocated_bytes + self.plan.machine.workspace_bytes,
            "device_bytes_in_use": self.in_use_bytes,
            "pinned_bytes": self.pinned_bytes,
            "in_bytes_per_step": self.traffic.in_bytes,
            "out_bytes_per_step": self.traffic.out_bytes,
            "page_hit_rate": self.traffic.hit_rate(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets::preset;

    #[test]
    fn flops_are_six_per_weight_and_twelve_per_pair() {
        let qwen = preset("qwen2.5-7b").unwrap();
        // design: 7.07e9 weights in linears, head included; attention 0.40 MFLOP per visible key forward, thrice that in all.
        let linears = model_flops(&qwen, Selection::Window(1), &[1_000]) / 1_000.0;
        assert!((linears / 6.0 - 7.07e9).abs() < 0.01e9, "{linears:e}");
        let (short, long) = (model_flops(&qwen, Selection::All, &[1]), model_flops(&qwen, Selection::All, &[2]));
        assert_eq!(long - 2.0 * short, 12.0 * 28.0 * 3584.0);
        let tiny = preset("tiny").unwrap();
        assert_eq!(model_flops(&tiny, Selection::All, &[5, 7]), model_flops(&tiny, Selection::Window(9), &[7, 5]));
    }
}
