//! Adapters: what is planned, trained and left alone, and the gradient of every factor.

use crate::common::*;
use oomb::engine::{Engine, machine};
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::model::config::Family;
use oomb::model::lora::{ALL_LINEAR, LoraConfig, Target, initial_values, lora_specs};
use oomb::plan::{Plan, Request, Tier, Training};
use oomb::train::{self, Update};
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, DType, Device, HostData, Tensor};

/// An adapter of odd rank, on all projections or on the last rows of fused ones.
pub fn adapters(all: bool) -> LoraConfig {
    let targets = if all { ALL_LINEAR.to_vec() } else { vec![Target::V, Target::Up] };
    LoraConfig { rank: 3, alpha: 5.0, rslora: all, targets }
}

/// The request with an adapter.
fn adapted(family: Family, setting: Setting, lora: LoraConfig) -> Request {
    Request { lora: Some(lora), ..request(&model(family), setting, 22, 2) }
}

/// An engine whose factors are both random, normal of standard deviation `std`.
pub fn random_adapter<B: Backend>(engine: &mut Engine<B>, std: f32, seed: u64) {
    let adapter = engine.adapter.as_mut().expect("an engine with an adapter");
    engine.device.fill_normal(&mut adapter.slab, std, seed);
    train::start_optimizer(engine);
}

/// A step such as real runs make.
fn update(step: u32) -> Update {
    let hyper = AdamW { lr: 2e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
    Update { hyper, clip_norm: Some(1.0), decay_norms_and_biases: true, seed: u64::from(step) }
}

/// As in gradient.rs.
#[test]
fn adapter_gradients_equal_finite_differences() {
    let mut random = Random::fresh("adapter_gradients_equal_finite_differences");
    for (family, all) in [(Family::Llama, true), (Family::Qwen2, true), (Family::Qwen3, false)] {
        let sequences = [sequence(&mut random, 22, 37, &[0, 9]), sequence(&mut random, 7, 37, &[0])];
        let setting = Setting { chunk_tokens: 8, keep: Keep::Attention, frames: Some(9), ..Setting::default() };
        let device = cpu(Real::F64);
        let request = adapted(family, setting, adapters(all));
        let mut engine = engine(&device, &request, setting.frames, Selection::Window(13), random.bits());
        random_adapter(&mut engine, 0.3, random.bits());
        let analytic = outcome(&mut engine, &sequences).grads;
        let factors = device.download_f64(&engine.trained().slab).unwrap();
        let mut loss_at = |factors: &[f64]| {
            device.upload(&mut engine.adapter.as_mut().unwrap().slab, HostData::F64(factors));
            let [a, b] = sequences.each_ref().map(|sequence| train::evaluate(&mut engine, sequence).unwrap());
            (a.sum + b.sum) / (a.labels + b.labels) as f64
        };
        for index in 0..40 {
            let mut element = random.below(factors.len());
            while analytic[element] == 0.0 {
                element = random.below(factors.len());
            }
            let step = 1e-5;
            let mut moved = factors.clone();
            moved[element] = factors[element] + step;
            let above = loss_at(&moved);
            moved[element] = factors[element] - step;
            let numeric = (above - loss_at(&moved)) / (2.0 * step);
            let error = (numeric - analytic[element]).abs();
            let bound = 1e-6 * numeric.abs() + 1e-9;
            assert!(error < bound, "{family:?} #{index}, element {element}: {numeric} {}", analytic[element]);
        }
    }
}

#[test]
fn only_the_adapter_has_gradients_and_state_and_planned_bytes_are_allocated_bytes() {
    for (compute_dtype, keep, optimizer) in
        [(DType::F32, Keep::All, true), (DType::Bf16, Keep::Inputs, true), (DType::Bf16, Keep::All, false)]
    {
        let device = Cpu::new(CpuOptions { compute_dtype, ..CpuOptions::default() });
        let setting = Setting { chunk_tokens: 8, keep, frames: Some(0), ..Setting::default() };
        let mut request = adapted(Family::Qwen2, setting, adapters(true));
        request.training = Some(Training { keep: Some(keep), optimizer });
        let plan = Plan::new(&request, &machine(&device, 1 << 30)).unwrap();
        let [trained, all] = plan.num_parameters();
        assert!(trained < all / 3, "{trained} of {all}");
        let slab = plan.buffer("adapter").shape.clone();
        assert!((trained..trained + trained / 2 + 256 * 42).contains(&slab[0]), "padding only: {slab:?} for {trained}");
        assert_eq!(plan.buffer("gradients").shape, slab);
        for name in ["adamw.m", "adamw.v", "adamw.master"] {
            let wanted = optimizer && (name != "adamw.master" || compute_dtype == DType::Bf16);
            let found = plan.buffers.iter().find(|buffer| buffer.name == name);
            assert_eq!(found.map(|buffer| &buffer.shape), wanted.then_some(&slab), "{name}");
        }
        let text = plan.to_string();
        assert!(text.contains("activations.adapter_hidden") && text.contains("trained   "), "{text}");
        let engine = engine(&device, &request, setting.frames, Selection::All, 1);
        assert_eq!(engine.plan.bytes(Tier::Device), device.device_bytes());
        assert_eq!(engine.plan.bytes(Tier::Host), device.pinned_bytes());
        assert_eq!(engine.grads.as_ref().unwrap().specs, lora_specs(&engine.config, &adapters(true)));
    }
}

/// Training moves every factor and nothing of the base, in f32 and with f32 masters of a bf16 adapter.
#[test]
fn training_moves_the_adapter_and_not_one_bit_of_the_base() {
    let mut random = Random::fresh("training_moves_the_adapter_and_not_one_bit_of_the_base");
    for compute_dtype in [DType::F32, DType::Bf16] {
        let device = Cpu::new(CpuOptions { compute_dtype, ..CpuOptions::default() });
        let setting = Setting { chunk_tokens: 8, keep: Keep::Attention, ..Setting::default() };
        let mut engine = engine(&device, &adapted(Family::Qwen2, setting, adapters(true)), None, Selection::All, random.bits());
        random_adapter(&mut engine, 0.3, random.bits());
        let bits = |tensor: &Tensor<Cpu>| device.download_f32(tensor).unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let (base, factors) = (bits(&engine.weights.slab), engine.trained().views.iter().map(bits).collect::<Vec<_>>());
        let sequences = [sequence(&mut random, 22, 37, &[0]), sequence(&mut random, 22, 37, &[0, 5])];
        let losses: Vec<f64> = (1..=12)
            .map(|step| {
                let loss = train::gradient(&mut engine, &sequences, u64::from(step)).unwrap().loss;
                train::update(&mut engine, &update(step));
                loss
            })
            .collect();
        assert!(losses[11] < losses[0] - 0.2, "{losses:?}");
        assert_eq!(bits(&engine.weights.slab), base);
        for ((before, view), spec) in factors.iter().zip(&engine.trained().views).zip(&engine.trained().specs) {
            let moved = before.iter().zip(bits(view)).filter(|(before, after)| *before != after).count();
            assert!(moved * 2 > before.len(), "{:?}: {moved} of {} moved", spec.id, before.len());
        }
    }
}

/// A fresh adapter adds exactly nothing; its first factor is spread as torch's `kaiming_uniform_(a=√5)` spreads it.
#[test]
fn a_new_adapter_starts_as_peft_s_does() {
    let mut random = Random::fresh("a_new_adapter_starts_as_peft_s_does");
    let setting = Setting { chunk_tokens: 8, ..Setting::default() };
    let (device, seed) = (cpu(Real::F32), random.bits());
    let sequences = [sequence(&mut random, 22, 37, &[0])];
    let mut plain = engine(&device, &request(&model(Family::Llama), setting, 22, 1), None, Selection::All, seed);
    let mut adapted = engine(&device, &adapted(Family::Llama, setting, adapters(true)), None, Selection::All, seed);
    let params = adapted.adapter.as_mut().unwrap();
    for (index, (spec, view)) in params.specs.iter().zip(&mut params.views).enumerate() {
        device.upload(view, HostData::F32(&initial_values(spec, index, 7)));
    }
    let losses = [&mut plain, &mut adapted].map(|engine| train::evaluate(engine, &sequences[0]).unwrap().sum);
    assert_eq!(losses[0].to_bits(), losses[1].to_bits());

    let wide = oomb::model::presets::preset("qwen2.5-0.5b").unwrap();
    let specs = lora_specs(&wide, &LoraConfig { rank: 16, alpha: 32.0, rslora: false, targets: vec![Target::Q, Target::Down] });
    for (index, spec) in specs.iter().enumerate().take(8) {
        let values = initial_values(spec, index, 3);
        if index % 2 == 1 {
            assert!(values.iter().all(|&b| b == 0.0));
            continue;
        }
        let bound = 1.0 / (spec.shape[1] as f32).sqrt();
        let [mean, square] =
            [1, 2].map(|power| values.iter().map(|x| f64::from(x / bound).powi(power)).sum::<f64>() / values.len() as f64);
        assert!(values.iter().all(|x| x.abs() <= bound) && values.iter().any(|x| x.abs() > 0.99 * bound));
        // Standard errors: 0.577 / √14336 and 0.298 / √14336.
        assert!(mean.abs() < 0.02 && (square - 1.0 / 3.0).abs() < 0.01, "{mean} {square}");
        assert_ne!(values[..50], initial_values(&specs[(index + 2) % 8], (index + 2) % 8, 3)[..50], "factors differ");
        assert_ne!(values, initial_values(spec, index, 4));
    }
}
