//! What must not change loss and gradient: chunk size, what is kept, device budget, prefetch, groups, loss tiles, the
//! split into micro-batches; and, to the bit, delays and poison.

use crate::common::*;
use oomb::kv::select::Selection;
use oomb::model::activations::{Keep, Kept};
use oomb::model::config::{Family, ModelConfig, RopeConfig, RopeScaling};
use oomb::plan::Request;
use oomb::train;
use oomb_device::DType;
use oomb_device::cpu::{Cpu, CpuOptions, Delays, Poison, Real};
use std::time::Duration;

/// f32 sums in another order: 24 bits of mantissa, some hundred terms, two layers of products.
const F32: f64 = 2e-5;

#[test]
fn nothing_but_rounding_changes_the_result() {
    let mut random = Random::fresh("nothing_but_rounding_changes_the_result");
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        let model = model(family);
        let weights = random.bits();
        for tokens in [2, 3, 4, 5, 15, 16, 17, 45] {
            for selection in [Selection::All, Selection::Window(6)] {
                let sequences = [sequence(&mut random, tokens, 37, &[0, tokens / 3])];
                let run = |setting: Setting, real| {
                    let device = cpu(real);
                    let request = request(&model, setting, 45, 1);
                    let mut engine = engine(&device, &request, setting.frames, selection, weights);
                    outcome(&mut engine, &sequences)
                };
                let exact = run(Setting::default(), Real::F64);
                for chunk_tokens in [4, 12, 48] {
                    for (keep, frames, prefetch_groups) in [
                        (Keep::All, None, 1),
                        (Keep::Attention, Some(0), 0),
                        (Keep::Inputs, Some(0), 3),
                        (Keep::Mlp, Some(14), 2),
                    ] {
                        let setting = Setting {
                            chunk_tokens,
                            keep,
                            frames,
                            prefetch_groups,
                            group_pages: 1 + random.below(4),
                            loss_tile_tokens: Some(1 + random.below(9)),
                            keep_budget: [0, 1 << 14, 1 << 16, 1 << 30][random.below(4)],
                            keep_host_budget: [0, 1 << 14, 1 << 16][random.below(3)],
                            ..Setting::default()
                        };
                        let got = run(setting, Real::F32);
                        let what = format!("{family:?}, {tokens} tokens, {selection:?}, {setting:?}");
                        assert!((got.loss - exact.loss).abs() < F32 * exact.loss, "{what}: {} {}", got.loss, exact.loss);
                        let error = relative_error(&got.grads, &exact.grads);
                        assert!(error < F32, "{what}: relative error {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn micro_batches_of_one_step_sum_to_the_step() {
    let mut random = Random::fresh("micro_batches_of_one_step_sum_to_the_step");
    let model = model(Family::Qwen3);
    let sequences = [23, 2, 40, 11].map(|tokens| sequence(&mut random, tokens, 37, &[0]));
    let labels: Vec<usize> = sequences.iter().map(|sequence| sequence.ids.len() - 1).collect();
    let setting = Setting { chunk_tokens: 8, ..Setting::default() };
    let device = cpu(Real::F64);
    let (weights, request) = (random.bits(), request(&model, setting, 40, 4));
    let mut engine = engine(&device, &request, None, Selection::All, weights);
    let together = outcome(&mut engine, &sequences);
    let mut sum = vec![0.0; together.grads.len()];
    let mut loss = 0.0;
    let total = labels.iter().sum::<usize>() as f64;
    for (sequence, labels) in sequences.iter().zip(labels) {
        let alone = outcome(&mut engine, std::slice::from_ref(sequence));
        loss += alone.loss * labels as f64 / total;
        for (sum, grad) in sum.iter_mut().zip(&alone.grads) {
            *sum += grad * labels as f64 / total;
        }
    }
    // The losses and the weight 1/labels pass through f32.
    assert!((loss - together.loss).abs() < 1e-6 * loss, "{loss} {}", together.loss);
    assert!(relative_error(&together.grads, &sum) < 1e-6);
}

/// Sequences that fit one chunk go through it together, and see none of each other; where RoPE depends on their lengths, they do not.
#[test]
fn short_sequences_share_a_chunk() {
    let mut random = Random::fresh("short_sequences_share_a_chunk");
    let lengths = [23, 2, 40, 11, 17, 40];
    let sequences = lengths.map(|tokens| sequence(&mut random, tokens, 37, &[0, tokens / 2]));
    let dynamic = RopeConfig { theta: 10_000.0, scaling: RopeScaling::Dynamic { factor: 2.0, original: 12 } };
    for (rope, expected) in [(model(Family::Qwen3).rope, [6, 2]), (dynamic, [6, 4])] {
        let model = ModelConfig { rope, ..model(Family::Qwen3) };
        let weights = random.bits();
        let run = |chunk_tokens| {
            let request = Request { chunk_tokens, ..request(&model, Setting::default(), 40, 6) };
            let mut engine = engine(&cpu(Real::F64), &request, None, Selection::Window(9), weights);
            (train::passes(&engine, &sequences).len(), outcome(&mut engine, &sequences))
        };
        let ((alone, expected_alone), (together, got)) = (run(8), run(100));
        assert_eq!([alone, together], expected);
        assert!((expected_alone.loss - got.loss).abs() < 1e-6 * got.loss, "{} {}", expected_alone.loss, got.loss);
        assert!(relative_error(&got.grads, &expected_alone.grads) < 1e-6);
    }
}

/// A missing event shows here: each stream is a thread, and one of them is slow.
#[test]
fn delays_and_poison_change_no_bit() {
    let mut random = Random::fresh("delays_and_poison_change_no_bit");
    let model = model(Family::Llama);
    let weights = random.bits();
    let sequences = [sequence(&mut random, 47, 37, &[0]), sequence(&mut random, 31, 37, &[0, 20])];
    for grad_dtype in [DType::F32, DType::Bf16] {
        for (keep, group_pages, prefetch_groups) in [(Keep::Inputs, 2, 1), (Keep::All, 1, 0), (Keep::Attention, 1, 4)] {
            let frames = Some(0);
            let setting =
                Setting { chunk_tokens: 8, keep, frames, grad_dtype, group_pages, prefetch_groups, ..Setting::default() };
            let run = |delays: Option<Delays>, poison: Poison| {
                let device = Cpu::new(CpuOptions { delays, poison, ..CpuOptions::default() });
                let request = request(&model, setting, 47, 2);
                let mut engine = engine(&device, &request, setting.frames, Selection::All, weights);
                assert!(engine.plan.layout.resident_groups < engine.plan.layout.shape.num_groups());
                let outcome = outcome(&mut engine, &sequences);
                let traffic = engine.store.traffic();
                assert!(traffic.in_bytes > 0 && traffic.out_bytes > 0, "nothing moved: {traffic:?}");
                let rate = traffic.hit_rate().expect("pages were read");
                assert!(traffic.pages_fetched > 0 && (0.0..1.0).contains(&rate), "{traffic:?}");
                outcome
            };
            let plain = run(None, Poison::Off);
            let slow = |compute, copy_in, copy_out| {
                let [compute, copy_in, copy_out] = [compute, copy_in, copy_out].map(Duration::from_micros);
                Some(Delays { compute, copy_in, copy_out, seed: 5 })
            };
            for delays in [None, slow(200, 0, 0), slow(0, 1500, 0), slow(0, 0, 1500), slow(100, 400, 400)] {
                let other = run(delays, Poison::On);
                assert_eq!(plain.loss.to_bits(), other.loss.to_bits(), "{setting:?} {delays:?}");
                assert!(plain.grads == other.grads, "{setting:?} {delays:?}");
            }
        }
    }
}

/// What is kept of more chunks than one, on the device or on the host, is what would be computed again.
#[test]
fn kept_activations_change_no_bit() {
    let mut random = Random::fresh("kept_activations_change_no_bit");
    let model = model(Family::Qwen3);
    let weights = random.bits();
    let sequences = [sequence(&mut random, 47, 37, &[0]), sequence(&mut random, 31, 37, &[0, 20])];
    let slow = |compute, copy_in, copy_out| {
        let [compute, copy_in, copy_out] = [compute, copy_in, copy_out].map(Duration::from_micros);
        Some(Delays { compute, copy_in, copy_out, seed: 5 })
    };
    let mut seen = Vec::new();
    for (keep, frames) in
        [(Keep::Inputs, None), (Keep::Attention, Some(0)), (Keep::Mlp, Some(14)), (Keep::All, Some(14)), (Keep::All, None)]
    {
        let run = |keep_budget: u64, keep_host_budget: u64, delays| {
            let setting = Setting { chunk_tokens: 8, keep, frames, keep_budget, keep_host_budget, ..Setting::default() };
            let device = Cpu::new(CpuOptions { delays, poison: Poison::On, ..CpuOptions::default() });
            let mut engine = engine(&device, &request(&model, setting, 47, 2), setting.frames, Selection::All, weights);
            // Twice: what the first step left on the host must not matter.
            let first = outcome(&mut engine, &sequences);
            let second = outcome(&mut engine, &sequences);
            assert!(first.grads == second.grads, "{setting:?}");
            (engine.plan.kept, engine.host.moved, first)
        };
        let (none, moved, plain) = run(0, 0, None);
        assert_eq!((none, moved), (Kept::default(), [0, 0]));
        for (keep_budget, keep_host_budget) in [
            (3 << 10, 0),
            (10 << 10, 0),
            (30 << 10, 10 << 10),
            (100 << 10, 10 << 10),
            (1 << 20, 1 << 20),
            (0, 14 << 10),
            (0, 1 << 20),
            (16 << 10, 25 << 10),
            (20 << 10, 0),
        ] {
            for delays in [None, slow(200, 0, 0), slow(0, 1500, 0), slow(0, 0, 1500)] {
                let (kept, moved, other) = run(keep_budget, keep_host_budget, delays);
                assert_eq!(plain.loss.to_bits(), other.loss.to_bits(), "{keep:?} {kept:?} {delays:?}");
                assert!(plain.grads == other.grads, "{keep:?} {kept:?} {delays:?}");
                let on_host = kept.attention.host + kept.inputs.host > 0;
                assert_eq!([on_host; 2], moved.map(|bytes| bytes > 0), "{kept:?} {moved:?}");
                assert!(!on_host || keep >= Keep::Attention, "{keep:?} {kept:?}");
                if !seen.contains(&kept) {
                    seen.push(kept);
                }
            }
        }
    }
    let all = Kept { chunks: 5, ..Kept::default() };
    assert!(seen.contains(&all), "{seen:?}");
    let some = |what: fn(&Kept) -> bool| assert!(seen.iter().any(what), "{seen:?}");
    some(|kept| kept.chunks > 0 && kept.attention.device > 0);
    some(|kept| kept.chunks == 0 && kept.inputs.device > 0 && kept.inputs.total() < kept.attention.total());
    some(|kept| kept.attention.device > 0 && kept.attention.host > 0);
    some(|kept| kept.inputs.host > 0 && kept.inputs.total() < kept.attention.total());
    some(|kept| kept.inputs.total() == 5);
}

/// The last document's gradient does not depend on the documents before it, nor the first one's loss on those after.
#[test]
fn documents_do_not_see_each_other() {
    let mut random = Random::fresh("documents_do_not_see_each_other");
    let model = model(Family::Llama);
    let mut a = sequence(&mut random, 30, 37, &[0, 13]);
    let mut b = a.clone();
    for t in 0..13 {
        b.ids[t] = (b.ids[t] + 1) % 37;
    }
    // Only the second document learns.
    for sequence in [&mut a, &mut b] {
        sequence.labels[..13].fill(oomb_device::ops::loss::IGNORE);
    }
    let setting = Setting { chunk_tokens: 8, ..Setting::default() };
    let device = cpu(Real::F32);
    let mut engine = engine(&device, &request(&model, setting, 30, 1), None, Selection::All, random.bits());
    let (a, b) = (outcome(&mut engine, &[a]), outcome(&mut engine, &[b]));
    assert_eq!(a.loss.to_bits(), b.loss.to_bits());
    assert!(a.grads == b.grads);
}
