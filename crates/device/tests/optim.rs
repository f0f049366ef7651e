//! Fill, copy, random weights, the global norm and AdamW.

mod common;
#[path = "optim/moments.rs"]
mod moments;

use common::{Output, Random, Rig, agree, distance};
use half::bf16;
use oomb_device::cpu::Cpu;
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::optim::{AdamW, AdamWState, Clip, Moment, OptimOps, RandomBits};
use oomb_device::{DType, Device, HostData, Tensor};

#[test]
fn normal_numbers_are_those_of_the_definition() {
    // Computed from the definition in Python: seed, element, value.
    let golden = [
        (0, 0, -0.4945786470379948),
        (0, 1, -0.8771415999332987),
        (0, 2, -2.695591939024276),
        (1234, 0, 0.3193611481213455),
        (1234, 99_999, -0.29381312416292976),
        (u64::MAX, 7, -1.066121338018564),
    ];
    let rig = Rig::reference();
    for (seed, element, value) in golden {
        let mut x = rig.void(rig.act, &[100_000]);
        rig.cpu.fill_normal(&mut x, 0.5, seed);
        let got = rig.get(&x)[element];
        assert!((got - 0.5 * value).abs() < 1e-14, "seed {seed} element {element}: {got}, wanted {}", 0.5 * value);
    }
}

#[test]
fn normal_numbers_have_mean_0_and_their_deviation() {
    let rig = Rig::reference();
    let mut x = rig.void(rig.act, &[1000, 1000]);
    rig.cpu.fill_normal(&mut x, 0.02, 5);
    let x = rig.get(&x);
    let mean = x.iter().sum::<f64>() / 1e6;
    let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e6).sqrt();
    // Four standard errors of a mean and of a deviation of a million.
    assert!(mean.abs() < 0.02 * 4e-3, "{mean}");
    assert!((deviation / 0.02 - 1.0).abs() < 2.9e-3, "{deviation}");
    agree(|rig| {
        let mut x = rig.void(rig.act, &[3, 17]);
        rig.cpu.fill_normal(&mut x, 0.02, 5);
        vec![Output::new(rig, "x", &x)]
    });
}

#[test]
fn fill_sets_every_element_rounded() {
    agree(|rig| {
        let mut x = rig.void(rig.act, &[3, 40_000]);
        rig.cpu.fill(&mut x, 0.3);
        assert!(rig.get(&x).windows(2).all(|pair| pair[0] == pair[1]));
        vec![Output::new(rig, "x", &x)]
    });
    let rig = Rig::reference();
    let mut x = new_tensor(&rig.cpu, DType::F64, &[2]).unwrap();
    rig.cpu.fill(&mut x, 0.25);
    assert_eq!(rig.get(&x), [0.25, 0.25]);
}

#[test]
fn copy_converts_and_rounds() {
    let values = Random::fresh().values(17);
    let exact: Vec<f64> = values.iter().map(|x| x / 3.0).collect();
    agree(|rig| {
        let source = rig.tensor(DType::F64, &[17], &exact);
        let mut narrow = rig.void(rig.act, &[17]);
        rig.cpu.copy(&mut narrow, &source);
        let mut wide = rig.tensor(DType::F64, &[17], &[0.0; 17]);
        let f32 = rig.tensor(DType::F32, &[17], &values);
        rig.cpu.copy(&mut wide, &f32);
        assert_eq!(rig.get(&wide), values);
        vec![Output::new(rig, "narrow", &narrow)]
    });
}

#[test]
fn sum_squares_accumulates_in_f64() {
    let mut random = Random::fresh();
    for len in [1, 17, 100_003] {
        let x = random.values(len);
        let expected = 7.0 + x.iter().map(|x| x * x).sum::<f64>();
        agree(|rig| {
            let mut out = rig.tensor(DType::F64, &[1], &[7.0]);
            rig.cpu.sum_squares(&mut out, &rig.tensor(DType::F32, &[len], &x));
            // The inputs are bf16 numbers: their squares are exact in f64 whatever holds them.
            assert!((rig.get(&out)[0] / expected - 1.0).abs() < 1e-12);
            vec![Output::new(rig, "out", &out)]
        });
    }
}

const HYPER: AdamW = AdamW { lr: 0.01, beta1: 0.75, beta2: 0.875, eps: 1e-3, weight_decay: 0.25, step: 1 };
const MAX_NORM: f32 = 0.5;

#[derive(Clone, Copy, PartialEq)]
enum Weights {
    Alone,
    WithMaster,
}

/// A moment in f32.
fn exact(values: &mut Tensor<Cpu>) -> Moment<'_, Cpu> {
    Moment { values, scales: None }
}

/// Three updates with the gradients given.
fn update(rig: &Rig, weights: Weights, w: &[f64], grads: &[Vec<f64>; 3], norm_squared: Option<f64>) -> Vec<Output> {
    let len = [w.len()];
    let zeros = vec![0.0; w.len()];
    let (mut param, mut master) = (rig.activation(&len, w), rig.tensor(DType::F32, &len, w));
    let (mut m, mut v) = (rig.tensor(DType::F32, &len, &zeros), rig.tensor(DType::F32, &len, &zeros));
    let norm = norm_squared.map(|x| rig.tensor(DType::F64, &[1], &[x]));
    for (step, grad) in (1..).zip(grads) {
        let master = (weights == Weights::WithMaster).then_some(&mut master);
        let state = AdamWState { master, m: exact(&mut m), v: exact(&mut v), random: RandomBits::default() };
        let clip = norm.as_ref().map(|norm_squared| Clip { norm_squared, max_norm: MAX_NORM });
        let gradient = rig.tensor(DType::F32, &len, grad);
        rig.cpu.adamw(&mut param, state, &gradient, AdamW { step, ..HYPER }, clip);
        assert_eq!(rig.get(&gradient), *grad, "the gradient was changed");
    }
    vec![Output::new(rig, "w", &param), Output::new(rig, "master", &master), Output::new(rig, "m", &m), Output::new(rig, "v", &v)]
}

/// torch.optim.AdamW's pseudo-code, one element at a time.
fn expected(w: &[f64], grads: &[Vec<f64>; 3], scale: f64) -> Vec<f64> {
    let [lr, beta1, beta2, eps, decay] = [HYPER.lr, HYPER.beta1, HYPER.beta2, HYPER.eps, HYPER.weight_decay].map(f64::from);
    let element = |(i, &w): (usize, &f64)| {
        let (mut w, mut m, mut v) = (w, 0.0, 0.0);
        for (step, grad) in (1..).zip(grads) {
            let g = grad[i] * scale;
            w -= lr * decay * w;
            m = beta1 * m + (1.0 - beta1) * g;
            v = beta2 * v + (1.0 - beta2) * g * g;
            let m_hat = m / (1.0 - beta1.powi(step));
            let v_hat: f64 = v / (1.0 - beta2.powi(step));
            w -= lr * m_hat / (v_hat.sqrt() + eps);
        }
        w
    };
    w.iter().enumerate().map(element).collect()
}

#[test]
fn adamw_is_the_published_update() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for len in [1, 17, 40_000] {
        let w = random.values(len);
        let grads = [random.values(len), random.values(len), random.values(len)];
        for weights in [Weights::Alone, Weights::WithMaster] {
            // No clipping; a norm of 3 clipped to 0.5; a norm below the limit.
            let clipped = f64::from(MAX_NORM) / (3.0 + 1e-6);
            for (norm_squared, scale) in [(None, 1.0), (Some(9.0), clipped), (Some(0.01), 1.0)] {
                let outputs = update(&rig, weights, &w, &grads, norm_squared);
                let wanted = expected(&w, &grads, scale);
                assert!(distance(&outputs[0].values, &wanted) < 1e-13);
                let master = if weights == Weights::Alone { &w } else { &wanted };
                assert!(distance(&outputs[1].values, master) < 1e-13);
            }
        }
    }
}

#[test]
fn a_master_keeps_what_bf16_loses() {
    let mut random = Random::fresh();
    let w = random.values(1000);
    let grads = [random.values(1000), random.values(1000), random.values(1000)];
    agree(|rig| update(rig, Weights::WithMaster, &w, &grads, Some(9.0)));
}

#[test]
fn uploads_of_every_type_round_once() {
    let exact = [1.0 + 1.0 / 256.0 + 1e-12, -3.0, 1e-40];
    agree(|rig| vec![Output::new(rig, "f64", &rig.activation(&[3], &exact))]);
    let rig = Rig::reference();
    let half = exact.map(half::f16::from_f64);
    let brain = exact.map(bf16::from_f64);
    let single = exact.map(|x| x as f32);
    let sources = [HostData::F16(&half), HostData::Bf16(&brain), HostData::F32(&single)];
    let expected = [half.map(half::f16::to_f64), brain.map(bf16::to_f64), single.map(f64::from)];
    for (source, expected) in sources.into_iter().zip(expected) {
        assert_eq!(rig.get(&tensor_from(&rig.cpu, DType::F32, &[3], source).unwrap()), expected);
    }
    assert_eq!(rig.cpu.download_f32(&rig.tensor(DType::F32, &[3], &exact)).unwrap(), single);
}
