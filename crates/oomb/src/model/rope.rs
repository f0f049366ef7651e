//! The frequencies of rotary embedding for a model and a sequence length, as transformers' `modeling_rope_utils` defines
//! them, in f64. It must not know positions or angles: those are the device's.

use super::config::{ModelConfig, RopeScaling};
use std::f64::consts::{PI, TAU};

/// `inv_freq` `[Dh/2]` and the factor on cos and sin. `sequence_tokens` is the largest position of the sequence plus one;
/// only dynamic scaling depends on it.
pub fn inv_freq(config: &ModelConfig, sequence_tokens: usize) -> (Vec<f64>, f32) {
    let (theta, dh) = (config.rope.theta, config.head_dim);
    match &config.rope.scaling {
        RopeScaling::None => (powers(theta, dh), 1.0),
        RopeScaling::Linear { factor } => (powers(theta, dh).into_iter().map(|f| f / factor).collect(), 1.0),
        RopeScaling::Dynamic { factor, original } => {
            let growth = sequence_tokens.max(*original) as f64 / *original as f64;
            let exponent = dh as f64 / (dh as f64 - 2.0);
            let grown = theta * (factor * growth - (factor - 1.0)).powf(exponent);
            (powers(grown, dh), 1.0)
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            let by_wavelength = |f: f64| {
                // Rotations within the original context.
                let rotations = *original as f64 * f / TAU;
                let smooth = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - smooth) * f / factor + smooth * f
            };
            (powers(theta, dh).into_iter().map(by_wavelength).collect(), 1.0)
        }
        RopeScaling::Yarn { .. } => yarn(&config.rope.scaling, theta, dh),
    }
}

/// `theta^(-2i/Dh)`.
fn powers(theta: f64, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect()
}

/// Between `beta_fast` rotations in the original context (left alone) and `beta_slow` (divided by the factor) a linear
/// ramp over dimensions (arXiv 2309.00071, section 3.2 and, for the factor on cos and sin, 3.4).
fn yarn(scaling: &RopeScaling, theta: f64, head_dim: usize) -> (Vec<f64>, f32) {
    let RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, mscale, truncate, original } = scaling else {
        panic!("yarn frequencies asked for {scaling:?}");
    };
    let dim_of = |rotations: f64| head_dim as f64 * (*original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dim_of(*beta_fast), dim_of(*beta_slow));
    if *truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
    if low == high {
        high += 0.001; // a step instead of a ramp, as in transformers
    }
    let blend = |(i, f): (usize, f64)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f / factor * ramp + f * (1.0 - ramp)
    };
    let magnitude = |mscale: f64| if *factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let scale = match (attention_factor, mscale) {
        (Some(given), _) => *given,
        (None, Some((mscale, mscale_all_dim))) => magnitude(*mscale) / magnitude(*mscale_all_dim),
        (None, None) => magnitude(1.0),
    };
    (powers(theta, head_dim).into_iter().enumerate().map(blend).collect(), scale as f32)
}
