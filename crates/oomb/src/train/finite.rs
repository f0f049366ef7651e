//! Whether weights and gradients are still numbers, and where they stopped being so. It must not know what is done then.

use super::passes;
use crate::data::Sequence;
use crate::engine::Engine;
use crate::model::params::ParamSpec;
use crate::schedule;
use oomb_device::{Backend, Result, Tensor};

/// Whether every weight of what is trained is finite: one pass.
///
/// # Panics
/// If the engine was planned for evaluation.
pub fn weights_are_finite<B: Backend>(engine: &mut Engine<B>) -> Result<bool> {
    let slab = engine.trained().slab.clone();
    is_finite(engine, &slab)
}

/// The tensor with the first weight that is not finite, in the order of the forward pass.
///
/// # Panics
/// If the engine was planned for evaluation.
pub fn first_bad_weight<B: Backend>(engine: &mut Engine<B>) -> Result<Option<String>> {
    let (specs, views) = (engine.trained().specs.clone(), engine.trained().views.clone());
    first_bad(engine, specs.iter().zip(&views))
}

/// The tensor whose gradient was the first not to be finite, in the order of the backward pass: from the head to the
/// embedding. What comes after it is spoilt by it.
///
/// # Panics
/// If the engine was planned for evaluation.
pub fn first_bad_gradient<B: Backend>(engine: &mut Engine<B>) -> Result<Option<String>> {
    let grads = engine.grads.as_ref().expect("an engine for training");
    let (specs, views) = (grads.specs.clone(), grads.views.clone());
    first_bad(engine, specs.iter().zip(&views).rev())
}

/// Where the forward of the step that was just done first left the finite numbers: a layer's output, or the head, and the
/// token. Goes forward again up to that token's chunk.
///
/// # Panics
/// If the engine was planned for evaluation.
pub fn first_bad_layer<B: Backend>(engine: &mut Engine<B>, sequences: &[Sequence]) -> Result<Option<String>> {
    for (index, sequence) in passes(engine, sequences).iter().enumerate() {
        let losses = engine.download_losses(index, sequence.ids.len())?;
        let Some(token) = losses.iter().position(|loss| !loss.is_finite()) else { continue };
        let chunks = engine.load(sequence, index);
        let end = chunks.iter().position(|chunk| chunk.tokens.contains(&token)).expect("chunks cover the sequence") + 1;
        schedule::evaluate(engine, &chunks[..end]);
        let layers = engine.config.num_layers;
        for layer in 0..layers {
            let output = engine.acts(&chunks[end - 1], layer).output;
            if engine.device.download_f32(&output)?.iter().any(|value| !value.is_finite()) {
                return Ok(Some(format!("the output of layer {layer} of {layers}, at token {token} of the sequence")));
            }
        }
        return Ok(Some(format!("the head, at token {token} of the sequence")));
    }
    Ok(None)
}

fn first_bad<'a, B: Backend>(
    engine: &mut Engine<B>,
    parameters: impl Iterator<Item = (&'a ParamSpec, &'a Tensor<B>)>,
) -> Result<Option<String>> {
    for (spec, view) in parameters {
        if is_finite(engine, view)? {
            continue;
        }
        for (name, rows) in &spec.sources {
            if !is_finite(engine, &view.narrow(rows.clone()))? {
                return Ok(Some(name.clone()));
            }
        }
    }
    Ok(None)
}

/// The squares of finite f32 or bf16 numbers have a finite sum in f64.
fn is_finite<B: Backend>(engine: &mut Engine<B>, x: &Tensor<B>) -> Result<bool> {
    let Engine { device, norm_squared: Some(sum), .. } = engine else { panic!("an engine for training") };
    device.fill(sum, 0.0);
    device.sum_squares(sum, x);
    Ok(device.download_f64(sum)?[0].is_finite())
}
