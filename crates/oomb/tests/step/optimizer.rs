//! The optimizer's state in every storage and place: the plan's choice and its bytes, the same bits wherever it lives, and a loss
//! close to that of f32.

use crate::common::*;
use crate::lora::{adapters, random_adapter};
use crate::plan::{gpu, large};
use oomb::data::Sequence;
use oomb::engine::Engine;
use oomb::kv::select::Selection;
use oomb::model::config::Family;
use oomb::plan::optimizer::StateRequest;
use oomb::plan::{Plan, Request, Tier};
use oomb::train::{self, Update};
use oomb_device::cpu::{Cpu, CpuOptions, Delays, Poison};
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, DType, Device};
use std::time::Duration;

/// Every storage of the moments, with and without masters.
pub const KINDS: [(DType, bool); 6] =
    [(DType::F32, true), (DType::F32, false), (DType::Bf16, true), (DType::Bf16, false), (DType::U8, true), (DType::U8, false)];

/// A block, or two of 8-bit moments alone: a model of these tests has dozens.
const SMALL_PIECES: u64 = 1 << 10;

pub fn state((dtype, masters): (DType, bool), tier: Tier) -> StateRequest {
    StateRequest { dtype: Some(dtype), master_weights: Some(masters), tier: Some(tier), piece_bytes: SMALL_PIECES }
}

pub fn steps<B: Backend>(engine: &mut Engine<B>, sequences: &[Sequence], steps: u32, lr: f32) -> Vec<f64> {
    let step = |step| {
        let loss = train::gradient(engine, sequences, u64::from(step)).expect("the device works").loss;
        let hyper = AdamW { lr, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
        let seed = u64::from(step) << 32;
        train::update(engine, &Update { hyper, clip_norm: Some(0.3), decay_norms_and_biases: false, seed });
        loss
    };
    (1..=steps).map(step).collect()
}

/// What is trained and all of the optimizer's state, as bits.
pub fn bits<B: Backend>(engine: &Engine<B>) -> Vec<Vec<u32>> {
    let (device, trained) = (&engine.device, engine.trained());
    let floats = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let mut all = vec![floats(device.download_f32(&trained.slab).expect("the device works"))];
    let state = engine.optimizer.as_ref().expect("an optimizer");
    for (part, dtype) in state.state().parts() {
        for range in &trained.ranges {
            let mut values = Vec::new();
            let read = state.read(device, part, range, |run| {
                values.extend(match dtype {
                    DType::U8 => device.download_u8(&run)?.into_iter().map(u32::from).collect(),
                    _ => floats(device.download_f32(&run)?),
                });
                Ok(())
            });
            read.expect("the device works");
            assert_eq!(values.len(), range.len().div_ceil(part.stride()), "{part:?}");
            all.push(values);
        }
    }
    all
}

/// Streamed from the host in dozens of pieces, whichever stream is slow, with memory poisoned: the same bits, clipping included.
/// A missing event shows here.
#[test]
fn a_state_on_the_host_is_one_on_the_device_to_the_bit() {
    let mut random = Random::fresh("a_state_on_the_host_is_one_on_the_device_to_the_bit");
    let (weights, sequences) = (random.bits(), [sequence(&mut random, 19, 37, &[0, 7])]);
    for (index, kind) in KINDS.into_iter().enumerate() {
        let lora = (index % 2 == 1).then(|| adapters(true));
        let run = |tier: Tier, delays: Option<Delays>, poison: Poison| {
            let device = Cpu::new(CpuOptions { delays, poison, compute_dtype: DType::Bf16, ..CpuOptions::default() });
            let setting = Setting { chunk_tokens: 8, ..Setting::default() };
            let optimizer_state = state(kind, tier);
            let request = Request { lora: lora.clone(), optimizer_state, ..request(&model(Family::Qwen2), setting, 19, 1) };
            let mut engine = engine(&device, &request, None, Selection::All, weights);
            if lora.is_some() {
                random_adapter(&mut engine, 0.3, weights ^ 1);
                train::start_optimizer(&mut engine);
            }
            let planned = engine.plan.optimizer.expect("an optimizer");
            let pieces = engine.trained().slab.len().div_ceil(planned.piece_elements);
            assert_eq!((planned.tier, pieces > 6), (tier, tier == Tier::Host), "{pieces} pieces");
            assert_eq!(engine.plan.bytes(Tier::Device), device.device_bytes(), "{kind:?}");
            assert_eq!(engine.plan.bytes(Tier::Host), device.pinned_bytes(), "{kind:?}");
            assert_eq!(device.pinned_bytes() > 0, tier == Tier::Host);
            let losses = steps(&mut engine, &sequences, 3, 1e-2);
            (losses, bits(&engine))
        };
        let plain = run(Tier::Device, None, Poison::Off);
        let slow = |compute, copy_in, copy_out| {
            let [compute, copy_in, copy_out] = [compute, copy_in, copy_out].map(Duration::from_micros);
            Some(Delays { compute, copy_in, copy_out, seed: 5 })
        };
        for delays in [None, slow(100, 0, 0), slow(0, 1500, 0), slow(0, 0, 1500), slow(100, 400, 400)] {
            assert!(run(Tier::Host, delays, Poison::On) == plain, "{kind:?} {delays:?}");
        }
    }
}

/// Sixty steps on one sequence: every kind of state learns as f32 with masters does.
#[test]
fn the_loss_falls_as_with_f32() {
    let mut random = Random::fresh("the_loss_falls_as_with_f32");
    let (weights, sequences) = (random.bits(), [sequence(&mut random, 40, 37, &[0])]);
    let run = |kind: (DType, bool)| {
        let device = Cpu::new(CpuOptions { compute_dtype: DType::Bf16, ..CpuOptions::default() });
        let optimizer_state = state(kind, Tier::Device);
        let request = Request { optimizer_state, ..request(&model(Family::Llama), Setting::default(), 40, 1) };
        steps(&mut engine(&device, &request, None, Selection::All, weights), &sequences, 60, 3e-3)
    };
    let exact = run(KINDS[0]);
    let fallen = exact[0] - exact[59];
    assert!(fallen > 1.0, "{exact:?}");
    for kind in &KINDS[1..] {
        let losses = run(*kind);
        // The mean distance of the two curves over the last ten steps, as a share of what the loss fell by.
        let apart = (50..60).map(|step| (losses[step] - exact[step]).abs()).sum::<f64>() / 10.0 / fallen;
        eprintln!("{kind:?}: {:.4} for {:.4}, {:.2} % of the fall apart", losses[59], exact[59], 100.0 * apart);
        assert!(apart < 0.05, "{kind:?}: {losses:?}\n{exact:?}");
    }
}

/// Qwen2.5-7B on ever smaller GPUs: exactness first, then speed, and the plan says what it took.
#[test]
fn the_most_exact_state_that_fits_is_taken() {
    let words = |device_gib, host_gib, state: StateRequest| {
        let request = Request { optimizer_state: state, ..large(1 << 14, true) };
        let plan = Plan::new(&request, &gpu(device_gib, host_gib)).map_err(|refusal| refusal.to_string())?;
        let words = plan.optimizer_words().expect("an optimizer");
        assert!(plan.to_string().contains(&format!("optimizer {words}\n")), "{plan}");
        Ok::<_, String>(words)
    };
    let auto = StateRequest::default();
    for (device_gib, host_gib, wanted) in [
        (160.0, 125.0, "f32 states, f32 masters, on the device"),
        (120.0, 125.0, "f32 states, f32 masters, streamed from the host (more does not fit)"),
        (120.0, 60.0, "bf16 states, f32 masters, on the device (more does not fit)"),
        (80.0, 60.0, "bf16 states, f32 masters, streamed from the host (more does not fit)"),
        (80.0, 30.0, "bf16 states, no masters, on the device (more does not fit)"),
        (70.0, 20.0, "int8 states, no masters, on the device (more does not fit)"),
    ] {
        assert_eq!(words(device_gib, host_gib, auto).as_deref(), Ok(wanted), "{device_gib} GiB and {host_gib} GiB");
    }
    // What is asked for is taken or refused.
    for kind in KINDS {
        for tier in [Tier::Device, Tier::Host] {
            let state = state(kind, tier);
            let got = words(160.0, 125.0, state).unwrap();
            assert!(got.contains("host") == (tier == Tier::Host) && got.contains("no masters") != kind.1, "{got}");
            assert!(!got.contains("more"), "{got}");
        }
    }
    let refused = words(100.0, 125.0, state((DType::F32, true), Tier::Device)).unwrap_err();
    assert!(refused.contains("adamw.master 28.37 GiB") && refused.contains("optimizer.state_dtype"), "{refused}");
    let part = StateRequest { dtype: Some(DType::U8), ..auto };
    assert_eq!(words(90.0, 20.0, part).as_deref(), Ok("int8 states, f32 masters, on the device"));
    assert_eq!(words(70.0, 20.0, part).as_deref(), Ok("int8 states, no masters, on the device (more does not fit)"));
}
