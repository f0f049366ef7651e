//! Whole steps on a GPU against the CPU. Without a GPU each test says that it was skipped.

use crate::common::*;
use crate::lora::{adapters, random_adapter};
use crate::optimizer::{KINDS, bits, state as optimizer_state, steps};
use oomb::data::Sequence;
use oomb::engine::Engine;
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::model::config::{Family, ModelConfig};
use oomb::plan::optimizer::StateRequest;
use oomb::plan::{Request, Tier};
use oomb::train;
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::cuda::Cuda;
use oomb_device::ops::optim::AdamW;
use oomb_device::{Backend, DType, Device};

/// What the kernels of compute capability 9.0 take; with `OOMB_PORTABLE_ATTENTION` set the others are tested.
const PAGE_TOKENS: usize = 128;

fn gpu() -> Option<Cuda> {
    Cuda::new(0).map_err(|error| eprintln!("skipped: no CUDA device: {error}")).ok()
}

/// A model that the attention kernels take: head dim 64, GQA 4/2.
fn wide(family: Family) -> ModelConfig {
    ModelConfig { head_dim: 64, hidden_size: 96, intermediate_size: 160, initializer_range: 0.08, ..model(family) }
}

fn wide_request(model: &ModelConfig, setting: Setting, tokens: usize) -> Request {
    let chunk_tokens = setting.chunk_tokens.min(tokens.next_multiple_of(PAGE_TOKENS));
    Request { page_tokens: PAGE_TOKENS, chunk_tokens, ..request(model, setting, tokens, 1) }
}

fn built<B: Backend>(device: &B, family: Family, setting: Setting, tokens: usize, seed: u64) -> Engine<B> {
    let request = wide_request(&wide(family), setting, tokens);
    engine(device, &request, setting.frames, Selection::Window(300), seed)
}

#[test]
fn loss_and_gradient_agree_with_the_cpu() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("loss_and_gradient_agree_with_the_cpu");
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let seed = random.bits();
        let sequences = [sequence(&mut random, 517, 37, &[0, 150])];
        let setting = Setting { chunk_tokens: 256, keep: Keep::Attention, ..Setting::default() };
        let cpu = |real, compute_dtype| {
            let device = Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
            outcome(&mut built(&device, family, setting, 517, seed), &sequences)
        };
        let exact = cpu(Real::F64, DType::F32);
        let reference = cpu(Real::F32, DType::Bf16);
        let got = outcome(&mut built(&cuda, family, setting, 517, seed), &sequences);
        let allowed = 2.0 * relative_error(&reference.grads, &exact.grads);
        let error = relative_error(&got.grads, &exact.grads);
        eprintln!("{family:?}: gradient {error:.2e}, allowed {allowed:.2e}; loss {} for {}", got.loss, exact.loss);
        assert!(error < allowed, "{family:?}: {error} {allowed}");
        // The loss is a mean over 515 labels of logits rounded to bf16.
        assert!((got.loss - exact.loss).abs() < 4e-3 * exact.loss, "{family:?}: {} {}", got.loss, exact.loss);
    }
}

/// The loss and the gradients of an adapter's factors, the base frozen.
#[test]
fn adapters_agree_with_the_cpu() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("adapters_agree_with_the_cpu");
    for (family, all) in [(Family::Llama, true), (Family::Qwen2, false), (Family::Qwen3, true)] {
        let (seed, sequences) = (random.bits(), [sequence(&mut random, 517, 37, &[0, 150])]);
        let setting = Setting { chunk_tokens: 256, keep: Keep::Attention, ..Setting::default() };
        let request = Request { lora: Some(adapters(all)), ..wide_request(&wide(family), setting, 517) };
        fn run<B: Backend>(device: &B, request: &Request, sequences: &[Sequence], seed: u64) -> Outcome {
            let mut engine = engine(device, request, None, Selection::Window(300), seed);
            // Small beside the weights: a larger one makes a gradient of which bf16 says nothing.
            random_adapter(&mut engine, 0.1, seed ^ 1);
            outcome(&mut engine, sequences)
        }
        let on_cpu = |real, compute_dtype| {
            let device = Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
            run(&device, &request, &sequences, seed)
        };
        let (exact, reference) = (on_cpu(Real::F64, DType::F32), on_cpu(Real::F32, DType::Bf16));
        let (got, again) = (run(&cuda, &request, &sequences, seed), run(&cuda, &request, &sequences, seed));
        assert!(got.grads == again.grads, "{family:?}: two runs differ");
        let allowed = 2.0 * relative_error(&reference.grads, &exact.grads);
        let error = relative_error(&got.grads, &exact.grads);
        eprintln!("{family:?}: gradient {error:.2e}, allowed {allowed:.2e}; loss {} for {}", got.loss, exact.loss);
        assert!(error < allowed, "{family:?}: {error} {allowed}");
        assert!((got.loss - exact.loss).abs() < 4e-3 * exact.loss, "{family:?}: {} {}", got.loss, exact.loss);
    }
}

/// Chunks, `Keep`, budget and prefetch change rounding only; the same run twice gives the same bits, streaming or not.
#[test]
fn settings_change_rounding_only_and_runs_repeat() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("settings_change_rounding_only_and_runs_repeat");
    for (family, grad_dtype) in [(Family::Llama, DType::F32), (Family::Qwen3, DType::Bf16)] {
        let seed = random.bits();
        let sequences = [sequence(&mut random, 700, 37, &[0, 300])];
        let run = |setting: Setting| outcome(&mut built(&cuda, family, setting, 700, seed), &sequences);
        let base = run(Setting { chunk_tokens: 768, ..Setting::default() });
        for (chunk_tokens, keep, frames, prefetch_groups) in [
            (128, Keep::All, None, 1),
            (256, Keep::Inputs, Some(0), 0),
            (128, Keep::Attention, Some(0), 3),
            (384, Keep::All, Some(14), 2),
        ] {
            let setting = Setting { chunk_tokens, keep, frames, prefetch_groups, grad_dtype, ..Setting::default() };
            let (first, second) = (run(setting), run(setting));
            assert_eq!(first.loss.to_bits(), second.loss.to_bits(), "{setting:?}");
            assert!(first.grads == second.grads, "{setting:?}: two runs differ");
            let error = relative_error(&first.grads, &base.grads);
            eprintln!("{family:?} {setting:?}: gradient {error:.2e}, loss {} for {}", first.loss, base.loss);
            // bf16 activations, rounded in another order: 2^-9 each, some ten in a chain.
            assert!(error < 2e-2 && (first.loss - base.loss).abs() < 2e-3 * base.loss, "{setting:?}: {error}");
        }
    }
}

/// The loss falls on a sequence that is seen again and again, and the plan's bytes are those allocated.
#[test]
fn training_lowers_the_loss() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("training_lowers_the_loss");
    let sequences = [sequence(&mut random, 400, 37, &[0])];
    let steps = |engine: &mut Engine<Cuda>, sequences: &[Sequence]| -> Vec<f64> {
        (1..=30)
            .map(|step| {
                let loss = train::gradient(engine, sequences, u64::from(step)).unwrap().loss;
                let hyper = AdamW { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
                train::update(engine, &train::Update { hyper, clip_norm: Some(1.0), decay_norms_and_biases: false, seed: 0 });
                loss
            })
            .collect()
    };
    let before = cuda.device_bytes();
    let mut engine = built(&cuda, Family::Qwen3, Setting { chunk_tokens: 128, ..Setting::default() }, 400, random.bits());
    assert_eq!(cuda.device_bytes() - before, engine.plan.bytes(oomb::plan::Tier::Device));
    let losses = steps(&mut engine, &sequences);
    assert!(losses[29] < losses[0] - 0.5, "{losses:?}");
}

/// One step of two small chunks over streamed pages: short enough for every tool that checks memory and races.
#[test]
fn one_small_step() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("one_small_step");
    let sequences = [sequence(&mut random, 250, 37, &[0, 100])];
    let setting = Setting { chunk_tokens: 128, keep: Keep::Attention, frames: Some(0), ..Setting::default() };
    let mut engine = built(&cuda, Family::Qwen3, setting, 250, random.bits());
    let loss = train::gradient(&mut engine, &sequences, 1).unwrap();
    let hyper = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1 };
    train::start_optimizer(&mut engine);
    train::update(&mut engine, &train::Update { hyper, clip_norm: Some(1.0), decay_norms_and_biases: false, seed: 0 });
    cuda.synchronize().unwrap();
    assert!(loss.loss.is_finite() && loss.grad_norm.is_finite(), "{loss:?}");
}

/// Every storage of the optimizer's state: streamed from the host in dozens of pieces it is that on the device, to the bit, and
/// the loss falls.
#[test]
fn optimizer_states_train_and_stream_to_the_bit() {
    let Some(cuda) = gpu() else { return };
    let mut random = Random::fresh("optimizer_states_train_and_stream_to_the_bit");
    let (seed, sequences) = (random.bits(), [sequence(&mut random, 400, 37, &[0])]);
    for kind in KINDS {
        let run = |tier: Tier| {
            let setting = Setting { chunk_tokens: 128, ..Setting::default() };
            let optimizer_state = StateRequest { piece_bytes: 16 << 10, ..optimizer_state(kind, tier) };
            let request = Request { optimizer_state, ..wide_request(&wide(Family::Qwen3), setting, 400) };
            let mut engine = engine(&cuda, &request, None, Selection::Window(300), seed);
            let losses = steps(&mut engine, &sequences, 30, 3e-3);
            (losses, bits(&engine))
        };
        let (device, host) = (run(Tier::Device), run(Tier::Host));
        eprintln!("{kind:?}: {} to {}", device.0[0], device.0[29]);
        assert!(device == host, "{kind:?}: {:?} on the device, {:?} on the host", device.0, host.0);
        assert!(device.0[29] < device.0[0] - 0.5, "{kind:?}: {:?}", device.0);
    }
}
