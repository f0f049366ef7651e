//! The plan is the allocation; what does not fit is refused with the sum and a knob that works.

use crate::common::*;
use oomb::engine::{Engine, machine};
use oomb::kv::select::Selection;
use oomb::model::activations::{Keep, Kept};
use oomb::model::config::Family;
use oomb::plan::optimizer::StateRequest;
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
