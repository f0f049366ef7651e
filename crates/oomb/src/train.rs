//! One optimizer step, and evaluation: sequences in, loss and an update out. It must not know files or terminals.

pub mod finite;

use crate::data::Sequence;
use crate::engine::Engine;
use crate::engine::optimizer::{Access, Part};
use crate::model::params::ParamSpec;
use crate::model::rope;
use crate::schedule::{self, Contribution};
use oomb_device::ops::optim::{AdamW, Clip};
use oomb_device::{Backend, Result};
use std::borrow::Cow;
use std::ops::Range;

/// Loss and gradient of one optimizer step, before the update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLoss {
    /// Mean over all labels of the step, nats.
    pub loss: f64,
    /// Global norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Tokens processed.
    pub tokens: usize,
    /// Labels that counted.
    pub labels: usize,
}

/// Sum and count of losses.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossSum {
    /// Nats, over all labels.
    pub sum: f64,
    /// Labels that counted.
    pub labels: usize,
}

impl LossSum {
    /// Nats per label; not a number where there was none.
    pub fn mean(&self) -> f64 {
        self.sum / self.labels as f64
    }

    /// `exp` of the mean.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    fn add(&mut self, losses: &[f64]) {
        self.sum += losses.iter().sum::<f64>();
    }
}

/// How the optimizer changes what is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Learning rate, betas and the rest; `weight_decay` is that of the parameters that decay.
    pub hyper: AdamW,
    /// Global norm above which the gradient is scaled down.
    pub clip_norm: Option<f32>,
    /// Whether norms and biases decay too.
    pub decay_norms_and_biases: bool,
    /// Of what is rounded stochastically: weights without masters, and moments that are not f32. Differs by step.
    pub seed: u64,
}

/// Clears the gradients, adds those of `sequences`, and waits for the loss and the global norm. The weights are not
/// touched, so that a caller who finds either not finite can stop with a good model.
///
/// # Panics
/// If the engine was planned for evaluation, or for fewer sequences.
pub fn gradient<B: Backend>(engine: &mut Engine<B>, sequences: &[Sequence], seed: u64) -> Result<StepLoss> {
    let labels = sequences.iter().map(Sequence::num_labels).sum::<usize>();
    let weight = 1.0 / labels.max(1) as f32;
    engine.grads.as_mut().expect("an engine for training").begin(&engine.device);
    let passes = passes(engine, sequences);
    for (index, sequence) in passes.iter().enumerate() {
        let chunks = engine.load(sequence, index);
        let seed = seed.wrapping_add((index as u64) << 48);
        schedule::forward_backward(engine, &chunks, Contribution { weight, seed });
    }
    let (Some(grads), Some(norm)) = (&mut engine.grads, &mut engine.norm_squared) else { unreachable!("checked above") };
    grads.end(&engine.device);
    engine.device.fill(norm, 0.0);
    engine.device.sum_squares(norm, &grads.slab);
    let grad_norm = engine.device.download_f64(norm)?[0].sqrt();
    let mut losses = LossSum { sum: 0.0, labels };
    for (index, sequence) in passes.iter().enumerate() {
        losses.add(&engine.download_losses(index, sequence.ids.len())?);
    }
    let tokens = sequences.iter().map(|sequence| sequence.ids.len()).sum();
    Ok(StepLoss { loss: losses.mean(), grad_norm, tokens, labels })
}

/// The sequences of a step as they go through the two passes: those that fit one chunk together go together, packed, so that the
/// gradient of a matrix is written once for all of them. RoPE frequencies that depend on the length must be the same.
pub fn passes<'a, B: Backend>(engine: &Engine<B>, sequences: &'a [Sequence]) -> Vec<Cow<'a, Sequence>> {
    let request = &engine.plan.request;
    let most = request.chunk_tokens.min(request.pass_tokens());
    let frequencies = |sequence: &Sequence| rope::inv_freq(&engine.config, sequence.longest());
    let mut passes: Vec<Cow<'a, Sequence>> = Vec::new();
    for sequence in sequences {
        match passes.last_mut() {
            Some(last) if last.ids.len() + sequence.ids.len() <= most && frequencies(last) == frequencies(sequence) => {
                last.to_mut().append(sequence);
            }
            _ => passes.push(Cow::Borrowed(sequence)),
        }
    }
    passes
}

/// Updates what is trained by its gradients; enqueued, not waited for.
///
/// # Panics
/// If the engine was planned without an optimizer.
pub fn update<B: Backend>(engine: &mut Engine<B>, update: &Update) {
    let Engine { device, weights, adapter, grads: Some(grads), norm_squared: Some(norm), optimizer: Some(state), .. } = engine
    else {
        panic!("an engine planned without an optimizer cannot update");
    };
    let trained = adapter.as_ref().unwrap_or(weights);
    state.for_each(device, Access::Update, |piece| {
        let own = trained.ranges.iter().zip(&trained.specs);
        let within = |range: &Range<usize>| piece.elements.start.max(range.start)..piece.elements.end.min(range.end);
        for (range, spec) in own.map(|(range, spec)| (within(range), spec)).filter(|(range, _)| !range.is_empty()) {
            let hyper = AdamW { weight_decay: decay(spec, update), ..update.hyper };
            let clip = update.clip_norm.map(|max_norm| Clip { norm_squared: norm, max_norm });
            let (mut weights, grad) = (trained.slab.narrow(range.clone()), grads.slab.narrow(range.clone()));
            device.adamw(&mut weights, piece.narrow(range).adamw(update.seed), &grad, hyper, clip);
        }
    });
}

fn decay(spec: &ParamSpec, update: &Update) -> f32 {
    if spec.is_matrix() || update.decay_norms_and_biases { update.hyper.weight_decay } else { 0.0 }
}

/// Clears the moments and copies what is trained into its f32 masters: the state before the first step.
pub fn start_optimizer<B: Backend>(engine: &mut Engine<B>) {
    let Engine { device, weights, adapter, optimizer: Some(state), .. } = engine else { return };
    let trained = adapter.as_ref().unwrap_or(weights);
    state.for_each(device, Access::Overwrite, |piece| {
        for (part, mut tensor) in piece.parts {
            match part {
                Part::Master => device.copy(&mut tensor, &trained.slab.narrow(piece.elements.clone())),
                Part::M | Part::V => device.fill(&mut tensor, 0.0),
                // Any power of two: zeros have no size.
                Part::MScales | Part::VScales => device.fill(&mut tensor, 1.0),
            }
        }
    });
}

/// The loss of one sequence, without a gradient.
pub fn evaluate<B: Backend>(engine: &mut Engine<B>, sequence: &Sequence) -> Result<LossSum> {
    let mut losses = LossSum { sum: 0.0, labels: sequence.num_labels() };
    losses.add(&token_losses(engine, sequence)?);
    Ok(losses)
}

/// The loss of each token of a sequence, nats; 0 where there is no label.
pub fn token_losses<B: Backend>(engine: &mut Engine<B>, sequence: &Sequence) -> Result<Vec<f64>> {
    let chunks = engine.load(sequence, 0);
    schedule::evaluate(engine, &chunks);
    engine.download_losses(0, sequence.ids.len())
}

/// Parameter `index` of what is trained, in f32: its master where there is one, else the parameter itself.
pub fn full_values<B: Backend>(engine: &Engine<B>, index: usize) -> Result<Vec<f32>> {
    let (device, trained) = (&engine.device, engine.trained());
    let Some(state) = engine.optimizer.as_ref().filter(|state| state.state().masters) else {
        return device.download_f32(&trained.views[index]);
    };
    let mut values = Vec::with_capacity(trained.specs[index].len());
    state.read(device, Part::Master, &trained.ranges[index], |run| {
        values.extend(device.download_f32(&run)?);
        Ok(())
    })?;
    Ok(values)
}
