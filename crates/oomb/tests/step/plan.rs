//! The plan is the allocation; what does not fit is refused with the sum and a knob that works.

use crate::common::*;
use oomb::engine::{Engine, machine};
use oomb::kv::select::Selection;
use oomb::model::activations::{Keep, Kept};
use oomb::model::config::Family;
use oomb::plan::optimizer::StateRequest;
use oomb::plan::time::Rates;
use oomb::plan::{Machine, Plan, Request, Tier, Training};
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::{DType, Device};

#[test]
fn planned_bytes_are_allocated_bytes() {
    for (family, real, compute_dtype) in
        [(Family::Llama, Real::F32, DType::F32), (Family::Qwen2, Real::F32, DType::Bf16), (Family::Qwen3, Real::F64, DType::F32)]
    {
        for (tokens, chunk_tokens, keep, frames, grad_dtype, keep_budget) in [
            (2, 4, Keep::All, None, DType::F32, 0),
            (45, 8, Keep::Inputs, Some(0), DType::F32, 30 << 10),
            (45, 8, Keep::Attention, Some(13), DType::Bf16, 0),
            (301, 64, Keep::All, None, DType::F32, 1 << 20),
        ] {
            let device = Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
            let setting = Setting { chunk_tokens, keep, frames, grad_dtype, keep_budget, ..Setting::default() };
            let engine = engine(&device, &request(&model(family), setting, tokens, 2), frames, Selection::All, 1);
            let what = format!("{family:?} {tokens} {setting:?}");
            assert_eq!(engine.plan.bytes(Tier::Device), device.device_bytes(), "{what}");
            assert_eq!(engine.plan.bytes(Tier::Host), device.pinned_bytes(), "{what}");
            assert_eq!(engine.plan.kept != Kept::default(), keep_budget > 0, "{what}");
            assert_eq!(frames.is_some(), device.pinned_bytes() > 0, "{what}");
            drop(engine);
            // What is still enqueued holds its memory.
            device.synchronize().unwrap();
            assert_eq!((device.device_bytes(), device.pinned_bytes()), (0, 0), "{what}");
        }
    }
}

#[test]
fn evaluation_plans_no_gradients_and_runs_in_its_bytes() {
    let device = cpu(Real::F32);
    let whole = request(&model(Family::Llama), Setting { chunk_tokens: 8, ..Setting::default() }, 45, 1);
    let plan = Plan::new(&Request { training: None, ..whole.clone() }, &machine(&device, 1 << 30)).unwrap();
    let training = Plan::new(&whole, &machine(&device, 1 << 30)).unwrap();
    assert!(plan.device_bytes() < training.device_bytes() / 3, "{plan}\n{training}");
    assert!(plan.buffers.iter().all(|buffer| !buffer.name.contains("grad") && !buffer.name.contains("adamw")), "{plan}");
    let bytes = plan.device_bytes();
    let _engine = Engine::new(&device, plan, Selection::All).unwrap();
    assert_eq!(device.device_bytes(), bytes);
}

/// A GPU of `device_gib` with `host_gib` of host memory.
pub fn gpu(device_gib: f64, host_gib: f64) -> Machine {
    let bytes = |gib: f64| (gib * f64::from(1 << 30)) as u64;
    Machine {
        device: "cuda:0".to_owned(),
        compute_dtype: DType::Bf16,
        element_bytes: [2, 4, 8, 4],
        device_memory: bytes(device_gib),
        host_memory: bytes(host_gib),
        shared: false,
        workspace_bytes: 64 << 20,
    }
}

pub fn large(sequence_tokens: usize, optimizer: bool) -> Request {
    Request {
        model: oomb::model::presets::preset("qwen2.5-7b").expect("a built-in shape"),
        sequence_tokens,
        sequences_per_step: 1,
        chunk_tokens: 8192,
        page_tokens: 128,
        group_pages: 16,
        prefetch_groups: 2,
        loss_tile_tokens: None,
        device_budget: None,
        keep_budget: None,
        keep_host_budget: None,
        grad_dtype: DType::Bf16,
        lora: None,
        training: Some(Training { keep: None, optimizer }),
        optimizer_state: StateRequest::default(),
    }
}

#[test]
fn free_memory_is_used_and_never_exceeded() {
    let mut device_only = 0;
    for sequence_tokens in [8192, 1 << 17, 1 << 19, 1 << 20] {
        let machine = gpu(139.0, 125.0);
        let plan = Plan::new(&large(sequence_tokens, false), &machine).unwrap();
        assert!(plan.device_bytes() <= machine.device_memory && plan.bytes(Tier::Host) <= machine.host_memory, "{plan}");
        let streams = plan.layout.host_slots() > 0;
        device_only += usize::from(!streams);
        if streams {
            // What streams is what the device has no room for: less than one more group of each layer is left free.
            let frame = 16 * 2 * 4 * 128 * 128 * (2 + 2);
            assert!(machine.device_memory - plan.device_bytes() < 28 * frame, "{plan}");
        }
    }
    assert!((1..4).contains(&device_only), "short sequences stay on the device, a million tokens do not");
}

#[test]
fn device_memory_hardly_grows_with_the_context() {
    let smallest = |sequence_tokens| {
        let mut request = large(sequence_tokens, false);
        request.training = Some(Training { keep: Some(Keep::Inputs), optimizer: false });
        request.device_budget = Some(request.smallest_budget(&gpu(139.0, 300.0)));
        request.keep_budget = Some(0);
        Plan::new(&request, &gpu(139.0, 300.0)).unwrap().device_bytes()
    };
    let growth = (smallest(1 << 20) - smallest(1 << 17)) as f64 / ((1 << 20) - (1 << 17)) as f64 * 10_000.0;
    assert!(growth < 3e6, "{growth} bytes per 10K tokens");
}

#[test]
fn refusals_name_the_sum_and_a_knob_that_works() {
    let f32_state = StateRequest { dtype: Some(DType::F32), tier: Some(Tier::Device), ..StateRequest::default() };
    let cases = [
        (Request { optimizer_state: f32_state, ..large(1 << 17, true) }, gpu(80.0, 125.0)),
        (Request { grad_dtype: DType::F32, ..large(1 << 20, false) }, gpu(60.0, 125.0)),
        (large(1 << 22, false), gpu(139.0, 125.0)),
        (
            Request { training: Some(Training { keep: Some(Keep::All), optimizer: false }), ..large(1 << 17, false) },
            gpu(60.0, 125.0),
        ),
    ];
    for (request, machine) in cases {
        let refusal = Plan::new(&request, &machine).unwrap_err();
        let message = refusal.to_string();
        eprintln!("{message}\n");
        assert!(message.contains("GiB") && message.contains("largest:"), "{message}");
        if let Some(tokens) = message.split("data.sequence_tokens = ").nth(1) {
            let tokens = tokens.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
            Plan::new(&Request { sequence_tokens: tokens, ..request.clone() }, &machine).unwrap();
        }
        if message.contains("schedule.keep = \"auto\"") {
            let training = request.training.map(|training| Training { keep: None, ..training });
            Plan::new(&Request { training, ..request.clone() }, &machine).unwrap();
        }
        let advises_auto = message.contains("optimizer.state_dtype, master_weights and placement = \"auto\"");
        assert_eq!(advises_auto, request.optimizer_state != StateRequest::default(), "{message}");
        if advises_auto {
            Plan::new(&Request { optimizer_state: StateRequest::default(), ..request }, &machine).unwrap();
        }
    }
}

#[test]
fn a_budget_below_the_smallest_ring_is_refused() {
    let machine = gpu(139.0, 125.0);
    let request = large(1 << 17, false);
    let smallest = request.smallest_budget(&machine);
    let with = |budget| Plan::new(&Request { device_budget: Some(budget), ..request.clone() }, &machine);
    assert_eq!(with(smallest).unwrap().layout.resident_groups, 0);
    let message = with(smallest - 1).unwrap_err().to_string();
    assert!(message.contains("kv.device_budget") && message.contains(&format!("{}KiB", smallest.div_ceil(1024))), "{message}");
}

/// Steps measured on one H200, forward and backward (docs/measurements.md): sequences, tokens, chunk, optimizer, tokens per second.
const MEASURED: [(usize, usize, usize, bool, f64); 7] = [
    (1, 8 << 10, 8192, false, 12_392.0),
    (1, 16 << 10, 8192, false, 11_109.0),
    (1, 32 << 10, 8192, false, 8_979.0),
    (1, 64 << 10, 8192, false, 6_290.0),
    (1, 128 << 10, 8192, false, 4_156.0),
    (1, 256 << 10, 8192, false, 2_491.0),
    (8, 8 << 10, 16_384, true, 12_609.0),
];

fn measured(sequences: usize, sequence_tokens: usize, chunk_tokens: usize, optimizer: bool) -> Plan {
    let state = StateRequest { dtype: Some(DType::U8), master_weights: Some(false), ..StateRequest::default() };
    let request = Request {
        sequences_per_step: sequences,
        chunk_tokens,
        grad_dtype: DType::F32,
        optimizer_state: state,
        ..large(sequence_tokens, optimizer)
    };
    Plan::new(&request, &gpu(139.2, 110.0)).expect("a 7B shape fits")
}

#[test]
fn the_predicted_time_is_near_the_measured_one() {
    let rates = Rates::built_in("NVIDIA H200").unwrap();
    for (sequences, tokens, chunk, optimizer, rate) in MEASURED {
        let plan = measured(sequences, tokens, chunk, optimizer);
        let time = plan.predict(&rates, Selection::All);
        let (predicted, measured) = (time.total(), plan.step_tokens() as f64 / rate);
        eprintln!("{sequences} x {tokens}: {time}; measured {measured:.3}, {:+.1} %", 100.0 * (predicted / measured - 1.0));
        assert!((predicted / measured - 1.0).abs() < 0.15, "{sequences} x {tokens}: {time}, measured {measured}");
    }
}

#[test]
fn more_work_takes_longer() {
    let rates = Rates::built_in("NVIDIA H200").unwrap();
    let time = |request: &Request, selection| Plan::new(request, &gpu(139.2, 110.0)).unwrap().predict(&rates, selection).total();
    let base = large(1 << 17, false);
    let seconds = time(&base, Selection::All);
    assert!(time(&large(1 << 18, false), Selection::All) > 2.0 * seconds);
    assert!(time(&base, Selection::Window(4096)) < 0.5 * seconds);
    let lean = Request { keep_budget: Some(0), keep_host_budget: Some(0), ..base.clone() };
    assert!(time(&lean, Selection::All) > 1.1 * seconds);
    let inputs = Request { training: Some(Training { keep: Some(Keep::Inputs), optimizer: false }), ..lean.clone() };
    assert!(time(&inputs, Selection::All) > time(&lean, Selection::All));
    // A link so slow that nothing lies under the rest.
    let streaming = Request { device_budget: Some(3 << 30), ..lean };
    let slow = Rates { link: 1e9, ..rates.clone() };
    let time = Plan::new(&streaming, &gpu(139.2, 110.0)).unwrap().predict(&slow, Selection::All);
    assert!(time.copies > 2.0 * seconds && time.total() >= time.copies, "{time}");
}

#[test]
fn the_fastest_chunk_is_the_one_that_trying_all_finds() {
    let rates = Rates::built_in("NVIDIA H200").unwrap();
    let mut sizes = Vec::new();
    for (tokens, sequences, device_gib) in [(2048, 64, 139.2), (8192, 8, 139.2), (1 << 16, 1, 139.2), (1 << 17, 1, 80.0)] {
        let request = Request { sequences_per_step: sequences, ..large(tokens, false) };
        let machine = gpu(device_gib, 110.0);
        let best = request.fastest(&machine, &rates, Selection::All).unwrap();
        let seconds = best.predict(&rates, Selection::All).total();
        for chunk_tokens in [1024, 2048, 4096, 8192, 16_384, 32_768] {
            if let Ok(plan) = Plan::new(&Request { chunk_tokens, ..request.clone() }, &machine) {
                assert!(
                    plan.predict(&rates, Selection::All).total() >= seconds,
                    "{chunk_tokens} beats {}",
                    best.request.chunk_tokens
                );
            }
        }
        assert!(best.shortfall() == 0);
        sizes.push(best.request.chunk_tokens);
    }
    eprintln!("{sizes:?}");
    assert!(sizes.iter().any(|&size| size != sizes[0]), "{sizes:?}");
    let impossible = large(1 << 17, true).fastest(&gpu(16.0, 16.0), &rates, Selection::All).unwrap_err();
    assert!(impossible.to_string().contains("does not fit"), "{impossible}");
}
