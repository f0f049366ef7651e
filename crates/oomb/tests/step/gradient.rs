//! The whole step's gradient against finite differences of the whole step's loss, both in f64.

use crate::common::*;
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::model::config::Family;
use oomb::train;
use oomb_device::cpu::Real;
use oomb_device::{Device, HostData};

/// Central differences with a step of 1e-5: truncation about 1e-10 of the third derivative, cancellation about 1e-11.
#[test]
fn gradient_equals_finite_differences() {
    let mut random = Random::fresh("gradient_equals_finite_differences");
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let model = model(family);
        let sequences = [sequence(&mut random, 22, 37, &[0, 9]), sequence(&mut random, 7, 37, &[0])];
        let setting = Setting { chunk_tokens: 8, keep: Keep::Attention, frames: Some(9), ..Setting::default() };
        let device = cpu(Real::F64);
        let mut engine = engine(&device, &request(&model, setting, 22, 2), setting.frames, Selection::Window(13), random.bits());
        let analytic = outcome(&mut engine, &sequences).grads;
        let weights = device.download_f64(&engine.weights.slab).unwrap();
        let mut loss_at = |weights: &[f64]| {
            device.upload(&mut engine.weights.slab, HostData::F64(weights));
            let sums = sequences.each_ref().map(|sequence| train::evaluate(&mut engine, sequence).unwrap());
            let [a, b] = sums;
            (a.sum + b.sum) / (a.labels + b.labels) as f64
        };
        for index in 0..60 {
            let mut element = random.below(weights.len());
            while analytic[element] == 0.0 {
                element = random.below(weights.len());
            }
            let step = 1e-5;
            let mut moved = weights.clone();
            moved[element] = weights[element] + step;
            let above = loss_at(&moved);
            moved[element] = weights[element] - step;
            let numeric = (above - loss_at(&moved)) / (2.0 * step);
            // The weight 1 / labels is f32, 6e-8 of the gradient; cancellation leaves 1e-12 of the loss over the step.
            let error = (numeric - analytic[element]).abs();
            let bound = 1e-6 * numeric.abs() + 1e-9;
            assert!(error < bound, "{family:?} #{index}, element {element}: {numeric} {}", analytic[element]);
        }
    }
}
