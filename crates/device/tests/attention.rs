//! Attention over pages: against a dense softmax in f64 and finite differences, by every division into groups, masks, sizes
//! and precisions, with everything that must not be read poisoned.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/gradient.rs"]
mod gradient;
#[path = "attention/problem.rs"]
mod problem;

use common::{Output, Random, Rig, agree, distance};
use gradient::{check_gradient, dot};
use half::bf16;
use oomb_device::DType;
use oomb_device::ops::attention::AttentionOps;
use problem::{Forward, Gradients, Problem, Sees, Sizes, shuffled};
use std::process::Command;

/// A small page in a chunk that starts after two of them.
const SMALL: Sizes = Sizes { t: 19, start: 16, page: 8, kv_heads: 2, ratio: 2, head_dim: 8, sees: Sees::All };
/// The page of real runs.
const PAGE: usize = 128;

/// Sizes that end everywhere around tiles, parts and pages.
fn sizes() -> Vec<Sizes> {
    let mut all = vec![SMALL];
    // Lengths around a page, from the start of the sequence and later, also off a page's start.
    for t in [1, 7, 8, 9, 17] {
        for start in [0, 24, 27] {
            all.push(Sizes { t, start, ..SMALL });
        }
    }
    for t in [1, PAGE - 1, PAGE, PAGE + 1, 300] {
        all.push(Sizes { t, start: 2 * PAGE, page: PAGE, kv_heads: 1, ratio: 1, ..SMALL });
    }
    for (kv_heads, ratio) in [(4, 1), (1, 3), (2, 4), (1, 7), (2, 8), (1, 300)] {
        all.push(Sizes { t: 11, kv_heads, ratio, ..SMALL });
    }
    for head_dim in [1, 4, 64, 100, 128] {
        all.push(Sizes { head_dim, ..SMALL });
    }
    for sees in [Sees::Window(3), Sees::Window(8), Sees::Window(21), Sees::Documents(5), Sees::Documents(13), Sees::Itself] {
        all.push(Sizes { sees, ..SMALL });
        all.push(Sizes { sees, t: 150, start: 90, ratio: 1, ..SMALL });
    }
    // More pages than a wave, more queries than parts.
    all.push(Sizes { t: 70, start: 300, page: 4, kv_heads: 1, ..SMALL });
    all.push(Sizes { t: 600, start: 250, page: 16, kv_heads: 1, ratio: 1, ..SMALL });
    all.push(Sizes { t: 600, start: 250, page: 4, sees: Sees::Window(100), ..SMALL });
    all
}

/// 1e-12: sums of at most 10^4 terms near 1 in f64, whose rounding (1e-16) adds up like the root of their number, with two
/// orders to spare.
const F64: f64 = 1e-12;

fn assert_near(what: &str, sizes: Sizes, got: &[f64], expected: &[f64], allowed: f64) {
    let error = distance(got, expected);
    assert!(error < allowed, "{what} is off by {error:e} in {sizes:?}");
}

fn assert_gradients_near(sizes: Sizes, got: &Gradients, expected: &Gradients, allowed: f64) {
    // A query that sees only itself gives q and k no gradient: then compare with dv's size.
    let unit = expected.dv.iter().map(|x| x * x).sum::<f64>().sqrt();
    for (what, got, expected) in [("dq", &got.dq, &expected.dq), ("dk", &got.dk, &expected.dk), ("dv", &got.dv, &expected.dv)] {
        let error = got.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        let size = expected.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-2 * unit);
        assert!(error < allowed * size, "{what} is off by {:e} in {sizes:?}", error / size);
    }
}

#[test]
fn forward_and_backward_are_the_dense_softmax() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for sizes in sizes() {
        let problem = Problem::new(&mut random, sizes);
        let groups = [sizes.pages()];
        let (got, expected) = (problem.forward(&rig, &groups), problem.dense_forward());
        assert_near("o", sizes, &got.o, &expected.o, F64);
        assert_near("lse", sizes, &got.lse, &expected.lse, F64);
        assert_gradients_near(sizes, &problem.backward(&rig, &groups, &got), &problem.dense_backward(), F64);
    }
}

#[test]
fn single_precision_is_near_the_dense_softmax() {
    let mut random = Random::fresh();
    let rig = Rig { cpu: Default::default(), act: DType::F32 };
    for sizes in sizes() {
        let problem = Problem::new(&mut random, sizes);
        let groups = [sizes.pages()];
        let (got, expected) = (problem.forward(&rig, &groups), problem.dense_forward());
        // f32 rounds at 6e-8; scores of up to 10 turn that into 6e-7 of a weight, and the sums average it down.
        assert_near("o", sizes, &got.o, &expected.o, 2e-6);
        assert_near("lse", sizes, &got.lse, &expected.lse, 2e-6);
        // Less what was there before, which adds its own rounding.
        assert_gradients_near(sizes, &problem.backward(&rig, &groups, &got), &problem.dense_backward(), 1e-5);
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for sees in [Sees::All, Sees::Window(3), Sees::Documents(6)] {
        let sizes = Sizes { t: 5, start: 6, page: 4, head_dim: 4, sees, ..SMALL };
        let problem = Problem::new(&mut random, sizes);
        let groups = [1, 2];
        let forward = problem.forward(&rig, &groups);
        let gradients = problem.backward(&rig, &groups, &forward);
        let loss = |problem: &Problem| dot(&problem.forward(&rig, &groups).o, &problem.d_o);
        let with = |change: &dyn Fn(&mut Problem)| {
            let mut problem = problem.clone();
            change(&mut problem);
            loss(&problem)
        };
        // Keys in front of the first visible position are never read: varying them changes nothing, as their gradient says.
        check_gradient("dq", &gradients.dq, &problem.q, |q| with(&|problem| problem.q.copy_from_slice(q)));
        check_gradient("dk", &gradients.dk, &problem.k, |k| with(&|problem| problem.k.copy_from_slice(k)));
        check_gradient("dv", &gradients.dv, &problem.v, |v| with(&|problem| problem.v.copy_from_slice(v)));
    }
}

#[test]
fn any_division_into_groups_gives_the_same() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for sees in [Sees::All, Sees::Window(11), Sees::Documents(13), Sees::Itself] {
        let sizes = Sizes { sees, t: 13, start: 29, ..SMALL };
        let problem = Problem::new(&mut random, sizes);
        let whole = problem.forward(&rig, &[sizes.pages()]);
        let whole_gradients = problem.backward(&rig, &[sizes.pages()], &whole);
        // Each of the six pages but the last ends a group or not.
        for ends in 1u32..1 << (sizes.pages() - 1) {
            let mut groups = vec![1];
            for page in 0..sizes.pages() - 1 {
                if ends >> page & 1 == 1 {
                    groups.push(1);
                } else {
                    *groups.last_mut().unwrap() += 1;
                }
            }
            let divided = problem.forward(&rig, &groups);
            assert_near("o", sizes, &divided.o, &whole.o, F64);
            assert_near("lse", sizes, &divided.lse, &whole.lse, F64);
            assert_gradients_near(sizes, &problem.backward(&rig, &groups, &divided), &whole_gradients, F64);
        }
        // A group may be empty.
        let divided = problem.forward(&rig, &[0, 2, 0, 4, 0]);
        assert_near("o", sizes, &divided.o, &whole.o, F64);
    }
}

#[test]
fn selected_pages_are_the_softmax_over_them() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    // Leaving out a page is the same as putting it where a window hides it: documents of 16 hide the first two pages of 8.
    let sizes = Sizes { t: 9, start: 16, sees: Sees::Documents(16), ..SMALL };
    let problem = Problem::new(&mut random, sizes);
    let whole = problem.forward(&rig, &[sizes.pages()]);
    let selected = problem.forward_pages(&rig, &(2..sizes.pages()).collect::<Vec<_>>());
    assert_eq!(selected.o, whole.o);
    assert_eq!(selected.lse, whole.lse);
    // Pages that are not consecutive: all but page 1, of a causal chunk.
    let sizes = Sizes { sees: Sees::All, ..sizes };
    let problem = Problem::new(&mut random, sizes);
    let got = problem.forward_pages(&rig, &[0, 2, 3, 4][..sizes.pages() - 1]);
    let expected = problem.dense_forward_without(8..16);
    assert_near("o", sizes, &got.o, &expected.o, F64);
    assert_near("lse", sizes, &got.lse, &expected.lse, F64);
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    let mut random = Random::fresh();
    let rig = Rig { cpu: Default::default(), act: DType::F32 };
    let mut problem = Problem::new(&mut random, SMALL);
    // Scores up to 500 in size: e^89 overflows f32, e^500 is well inside f64.
    problem.scale = 500.0 / SMALL.head_dim as f32;
    let expected = problem.dense_forward();
    for groups in [vec![5], vec![1, 1, 1, 1, 1], vec![2, 3]] {
        let got = problem.forward(&rig, &groups);
        // A score of 500 is rounded by 3e-5, and its weight by as much.
        assert_near("o", SMALL, &got.o, &expected.o, 2e-4);
        assert_near("lse", SMALL, &got.lse, &expected.lse, 1e-6);
        let gradients = problem.backward(&rig, &groups, &got);
        assert_near("dv", SMALL, &gradients.dv, &problem.dense_backward().dv, 2e-4);
    }
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for sizes in [SMALL, Sizes { t: 140, start: 128, page: 128, kv_heads: 1, head_dim: 16, ..SMALL }] {
        let problem = Problem::new(&mut random, sizes);
        let forward = problem.dense_forward();
        agree(|rig| {
            let got = problem.forward(rig, &[1, sizes.pages() - 1]);
            vec![Output { name: "o", dtype: rig.act, values: got.o }, Output { name: "lse", dtype: DType::F32, values: got.lse }]
        });
        // The same o for all, rounded to bf16 beforehand so that delta is the same too.
        let o = forward.o.iter().map(|&o| bf16::from_f64(o).to_f64()).collect();
        let forward = Forward { o, lse: forward.lse };
        agree(|rig| {
            let got = problem.backward_onto(rig, &[1, sizes.pages() - 1], &forward, (DType::F32, 0));
            let output = |name, values| Output { name, dtype: DType::F32, values };
            vec![output("dq", got.dq), output("dk", got.dk), output("dv", got.dv)]
        });
    }
}

#[test]
fn delta_is_the_row_sum() {
    let mut random = Random::fresh();
    for shape @ [t, heads, head_dim] in [[1, 1, 4], [5, 3, 20], [300, 7, 128]] {
        let (o, d_o) = (random.values(t * heads * head_dim), random.values(t * heads * head_dim));
        let delta = |rig: &Rig| {
            let mut delta = rig.void(DType::F32, &shape[..2]);
            rig.cpu.attention_delta(&mut delta, &rig.activation(&shape, &o), &rig.activation(&shape, &d_o));
            vec![Output::new(rig, "delta", &delta)]
        };
        let expected: Vec<f64> = o.chunks(head_dim).zip(d_o.chunks(head_dim)).map(|(o, d_o)| dot(o, d_o)).collect();
        assert!(distance(&delta(&Rig::reference())[0].values, &expected) < 1e-14);
        agree(delta);
    }
}

#[test]
fn bf16_gradients_are_rounded_without_bias() {
    const SEEDS: u64 = 1500;
    let mut random = Random::fresh();
    let sizes = Sizes { t: 3, start: 5, page: 4, kv_heads: 2, ratio: 1, head_dim: 4, sees: Sees::All };
    let problem = Problem::new(&mut random, sizes);
    for rig in [Rig::reference(), Rig { cpu: Default::default(), act: DType::F32 }] {
        let forward = problem.forward(&rig, &[2]);
        let exact = problem.backward_onto(&rig, &[2], &forward, (DType::F32, 0));
        let exact: Vec<f64> = exact.dk.iter().chain(&exact.dv).copied().collect();
        let mut sum = vec![0.0; exact.len()];
        for seed in 0..SEEDS {
            let rounded = problem.backward_onto(&rig, &[2], &forward, (DType::Bf16, seed));
            assert_eq!(rounded.dq, problem.backward_onto(&rig, &[2], &forward, (DType::F32, 0)).dq);
            for ((sum, x), &exact) in sum.iter_mut().zip(rounded.dk.iter().chain(&rounded.dv)).zip(&exact) {
                assert_eq!(*x, bf16::from_f64(*x).to_f64());
                assert!((x - exact).abs() < ulp(exact), "{x} is not beside {exact}");
                *sum += x;
            }
        }
        for (&sum, &exact) in sum.iter().zip(&exact) {
            // The mean of n choices between neighbours has a standard deviation of at most half their distance over the
            // root of n; beyond six of those lies one case in 5e8.
            let allowed = 6.0 * 0.5 * ulp(exact) / (SEEDS as f64).sqrt();
            let mean = sum / SEEDS as f64;
            assert!((mean - exact).abs() <= allowed, "mean {mean}, exact {exact}, allowed {allowed:e}");
        }
    }
}

/// Distance of neighbouring bf16 at `x`: eight significant bits.
fn ulp(x: f64) -> f64 {
    (x.abs().log2().floor() - 7.0).exp2()
}

#[test]
fn placement_changes_no_bit() {
    let (mut random, rig) = (Random::fresh(), Rig { cpu: Default::default(), act: DType::F32 });
    let mut problem = Problem::new(&mut random, SMALL);
    let forward = problem.forward(&rig, &[5]);
    let gradients = problem.backward_onto(&rig, &[5], &forward, (DType::Bf16, 7));
    problem.slots = shuffled(&mut random, SMALL.pages());
    problem.gradient_slots = shuffled(&mut random, SMALL.pages());
    assert_eq!(problem.forward(&rig, &[5]).o, forward.o);
    assert_eq!(problem.backward_onto(&rig, &[5], &forward, (DType::Bf16, 7)), gradients);
    assert_ne!(problem.backward_onto(&rig, &[5], &forward, (DType::Bf16, 8)).dk, gradients.dk);
}

/// Set for the runs of this binary that the test below starts.
const BITS: &str = "OOMB_TEST_ATTENTION_BITS";

#[test]
fn neither_threads_nor_repetition_change_a_bit() {
    if std::env::var(BITS).is_ok() {
        // Of all bits, printed for the parent: FNV-1a.
        let sum = bits().iter().fold(0xCBF2_9CE4_8422_2325u64, |sum, x| (sum ^ x).wrapping_mul(0x100_0000_01B3));
        println!("bits:{sum:x}:");
        return;
    }
    let run = |threads: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "neither_threads_nor_repetition_change_a_bit", "--nocapture"]);
        let seed = std::env::var("OOMB_TEST_SEED").unwrap_or("20261201".into());
        let output = child.env(BITS, "1").env("RAYON_NUM_THREADS", threads).env("OOMB_TEST_SEED", seed).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().split(':').skip_while(|part| !part.ends_with("bits")).nth(1).unwrap().to_owned()
    };
    let one = run("1");
    for threads in ["1", "2", "2", "5"] {
        assert_eq!(run(threads), one, "{threads} threads");
    }
}

/// Of results at a size that makes many tasks.
fn bits() -> Vec<u64> {
    let (mut random, rig) = (Random::fresh(), Rig { cpu: Default::default(), act: DType::F32 });
    let sizes = Sizes { t: 600, start: 700, page: 16, kv_heads: 2, ratio: 2, head_dim: 8, sees: Sees::All };
    let problem = Problem::new(&mut random, sizes);
    let groups = [40, sizes.pages() - 40];
    let forward = problem.forward(&rig, &groups);
    let gradients = problem.backward_onto(&rig, &groups, &forward, (DType::Bf16, 3));
    let all = [forward.o, forward.lse, gradients.dq, gradients.dk, gradients.dv];
    all.iter().flatten().map(|x| x.to_bits()).collect()
}
