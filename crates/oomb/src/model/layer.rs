//! One layer, forward and backward, as straight-line calls of fused ops. It must not know where pages are stored: it is
//! given slots and positions.

use super::activations::{Gradients, LayerActivations};
use super::config::ModelConfig;
use super::projection;
use super::weights::{LayerGrads, LayerWeights};
use oomb_device::Backend;
use oomb_device::ops::attention::{AttentionBackward, Mask, Pages, Part};
use oomb_device::ops::linear::{Epilogue, Write};
use oomb_device::ops::rope::{QkNorm, QkNormGrad};

/// The layer's norm of q and k, where it has one.
fn qk_norm<'a, B: Backend>(config: &ModelConfig, weights: &'a LayerWeights<B>) -> Option<QkNorm<'a, B>> {
    let (q_weight, k_weight) = (weights.q_norm.as_ref()?, weights.k_norm.as_ref()?);
    Some(QkNorm { q_weight, k_weight, eps: config.norm_eps })
}

/// Norm, projection, rotation: from `input` to `q`, and k, v into `pages` from `first_row` of the first on, or nowhere where the
/// pages hold them already.
pub fn project<B: Backend>(
    device: &B,
    config: &ModelConfig,
    weights: &LayerWeights<B>,
    acts: &mut LayerActivations<B>,
    (pages, first_row): (Option<Pages<'_, B>>, usize),
) {
    let eps = config.norm_eps;
    device.rmsnorm_forward(&mut acts.attention_normed, &mut acts.attention_rstd, &acts.input, &weights.attention_norm, eps);
    let bias = weights.qkv_bias.as_ref().map_or(Epilogue::None, Epilogue::Bias);
    projection::forward(device, &mut acts.qkv, &acts.attention_normed, &weights.qkv, bias, &mut acts.adapters);
    device.qkv_forward(&mut acts.q, pages, first_row, &acts.qkv, qk_norm(config, weights), &acts.rope_table);
}

/// Attends to one group of pages: `attended` is complete after the last.
pub fn attend<B: Backend>(device: &B, acts: &mut LayerActivations<B>, kv: Pages<'_, B>, mask: Mask<'_, B>, part: Part) {
    device.attention_forward(&mut acts.attended, &mut acts.lse, &mut acts.attention_sum, &acts.q, kv, mask, part);
}

/// Output projection with the residual, norm, and the first product of the MLP: from `attended` to `gate_up`.
pub fn expand<B: Backend>(device: &B, config: &ModelConfig, weights: &LayerWeights<B>, acts: &mut LayerActivations<B>) {
    let attended = acts.attended.reshape(&[acts.input.rows(), config.q_width()]);
    let residual = Epilogue::Residual(&acts.input);
    projection::forward(device, &mut acts.middle, &attended, &weights.output, residual, &mut acts.adapters);
    normalise(device, config, weights, acts);
    projection::forward(device, &mut acts.gate_up, &acts.mlp_normed, &weights.gate_up, Epilogue::None, &mut acts.adapters);
}

/// The MLP's norm: from `middle` to `mlp_normed`.
pub fn normalise<B: Backend>(device: &B, config: &ModelConfig, weights: &LayerWeights<B>, acts: &mut LayerActivations<B>) {
    device.rmsnorm_forward(&mut acts.mlp_normed, &mut acts.mlp_rstd, &acts.middle, &weights.mlp_norm, config.norm_eps);
}

/// The rest of the MLP with the residual: from `gate_up` and `middle` to `output`.
pub fn contract<B: Backend>(device: &B, weights: &LayerWeights<B>, acts: &mut LayerActivations<B>) {
    device.swiglu_forward(&mut acts.swiglu, &acts.gate_up);
    let residual = Epilogue::Residual(&acts.middle);
    projection::forward(device, &mut acts.output, &acts.swiglu, &weights.down, residual, &mut acts.adapters);
}

/// Backward from `d_hidden` at the layer's output to `d_hidden` at `middle` and the gradient of attention's output;
/// prepares `delta` and clears dq. Reads everything from `attended` to `gate_up`.
pub fn backward_mlp<B: Backend>(
    device: &B,
    config: &ModelConfig,
    weights: &LayerWeights<B>,
    grads: &mut LayerGrads<B>,
    acts: &mut LayerActivations<B>,
    d: &mut Gradients<B>,
) {
    // The product's input is computed again on the way, as `d_swiglu`; its adapters need it before.
    let adapted = !weights.down.adapters.is_empty();
    if adapted {
        device.swiglu_forward(&mut acts.swiglu, &acts.gate_up);
        let (dx, dy) = (&mut d.d_swiglu, &d.d_hidden);
        projection::backward(device, (dx, dy), &acts.swiglu, &weights.down, &mut grads.down, &mut acts.adapters);
    } else {
        device.linear_backward_input(&mut d.d_swiglu, &d.d_hidden, &weights.down.weight, Write::Overwrite);
    }
    device.swiglu_backward(&mut acts.gate_up, &mut d.d_swiglu);
    if let Some(weight) = grads.down.weight.as_mut().filter(|_| !adapted) {
        weight.add(device, &d.d_hidden, &d.d_swiglu);
    }
    let (dx, dy) = (&mut d.d_normed, &acts.gate_up);
    projection::backward(device, (dx, dy), &acts.mlp_normed, &weights.gate_up, &mut grads.gate_up, &mut acts.adapters);
    let norm = (&mut d.d_hidden, grads.mlp_norm.as_mut());
    device.rmsnorm_backward(norm.0, norm.1, &d.d_normed, &acts.middle, &acts.mlp_rstd, &weights.mlp_norm);

    let shape = [d.d_hidden.rows(), config.q_width()];
    let (attended, mut d_attended) = (acts.attended.reshape(&shape), d.d_attended.reshape(&shape));
    let (dx, dy) = (&mut d_attended, &d.d_hidden);
    projection::backward(device, (dx, dy), &attended, &weights.output, &mut grads.output, &mut acts.adapters);
    device.attention_delta(&mut d.delta, &acts.attended, &d.d_attended);
    device.fill(&mut acts.attention_sum, 0.0);
}

/// Attention's backward through one group of pages: dq is complete after the last, the group's dk, dv have grown.
pub fn backward_attend<B: Backend>(
    device: &B,
    acts: &mut LayerActivations<B>,
    d: &Gradients<B>,
    kv: Pages<'_, B>,
    dkv: Pages<'_, B>,
    mask: Mask<'_, B>,
    seed: u64,
) {
    let (q, d_o, lse, delta) = (&acts.q, &d.d_attended, &acts.lse, &d.delta);
    device.attention_backward(&mut acts.attention_sum, dkv, AttentionBackward { q, kv, d_o, lse, delta, mask, seed });
}

/// Backward through rotation, projection and norm, given the complete dk, dv of the chunk's own pages: `d_hidden` is then
/// the gradient of the layer's input.
pub fn backward_project<B: Backend>(
    device: &B,
    config: &ModelConfig,
    weights: &LayerWeights<B>,
    grads: &mut LayerGrads<B>,
    acts: &mut LayerActivations<B>,
    d: &mut Gradients<B>,
    own: Pages<'_, B>,
) {
    let norm_grads = grads.q_norm.as_mut().zip(grads.k_norm.as_mut());
    let norm_grads = norm_grads.map(|(dq_weight, dk_weight)| QkNormGrad { dq_weight, dk_weight });
    let norm = qk_norm(config, weights).map(|norm| (norm, norm_grads));
    device.qkv_backward(&mut acts.qkv, &acts.attention_sum, own, norm, &acts.rope_table);
    if let Some(bias) = &mut grads.qkv_bias {
        device.linear_backward_bias(bias, &acts.qkv);
    }
    let (dx, dy) = (&mut d.d_normed, &acts.qkv);
    projection::backward(device, (dx, dy), &acts.attention_normed, &weights.qkv, &mut grads.qkv, &mut acts.adapters);
    let norm = (&mut d.d_hidden, grads.attention_norm.as_mut());
    device.rmsnorm_backward(norm.0, norm.1, &d.d_normed, &acts.input, &acts.attention_rstd, &weights.attention_norm);
}
