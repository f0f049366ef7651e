//! SwiGLU: formula, gradients, precisions.

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::ops::mlp::MlpOps;

const SHAPES: [(usize, usize); 4] = [(1, 8), (3, 24), (17, 11), (17, 24)];

fn forward(rig: &Rig, (t, f): (usize, usize), gate_up: &[f64]) -> Output {
    let mut y = rig.void(rig.act, &[t, f]);
    rig.cpu.swiglu_forward(&mut y, &rig.activation(&[t, 2 * f], gate_up));
    Output::new(rig, "y", &y)
}

/// The gradient, and the output again.
fn backward(rig: &Rig, (t, f): (usize, usize), gate_up: &[f64], dy: &[f64]) -> [Output; 2] {
    let (mut gate_up, mut dy) = (rig.activation(&[t, 2 * f], gate_up), rig.activation(&[t, f], dy));
    rig.cpu.swiglu_backward(&mut gate_up, &mut dy);
    [Output::new(rig, "dgate_up", &gate_up), Output::new(rig, "y", &dy)]
}

/// Gates between -8 and 8, where the sigmoid bends.
fn gates(random: &mut Random, len: usize) -> Vec<f64> {
    random.values(len).iter().map(|x| 8.0 * x).collect()
}

#[test]
fn forward_is_the_formula() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for shape @ (t, f) in SHAPES {
        let gate_up = gates(&mut random, t * 2 * f);
        let row = |row: usize| {
            let (gate, up) = gate_up[row * 2 * f..][..2 * f].split_at(f);
            gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect::<Vec<f64>>()
        };
        let expected: Vec<f64> = (0..t).flat_map(row).collect();
        assert!(distance(&forward(&rig, shape, &gate_up).values, &expected) < 1e-14);
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for shape @ (t, f) in SHAPES {
        let (gate_up, dy) = (gates(&mut random, t * 2 * f), random.values(t * f));
        let [gradient, y] = backward(&rig, shape, &gate_up, &dy);
        assert_eq!(y.values, forward(&rig, shape, &gate_up).values);
        check_gradient("dgate_up", &gradient.values, &gate_up, |x| dot(&forward(&rig, shape, x).values, &dy));
        // Overwritten, not added to: twice the output's gradient gives twice the result, whatever was there.
        let twice: Vec<f64> = dy.iter().map(|x| 2.0 * x).collect();
        let difference = added(&backward(&rig, shape, &gate_up, &twice)[0].values, &gradient.values);
        assert!(distance(&difference, &gradient.values) < 1e-14);
    }
}

#[test]
fn extreme_gates_saturate() {
    let rig = Rig::reference();
    let y = forward(&rig, (1, 3), &[-1000.0, 1000.0, 0.0, 1.0, 1.0, 1.0]);
    assert_eq!(y.values, [0.0, 1000.0, 0.0]);
    agree(|rig| vec![forward(rig, (1, 3), &[-1000.0, 100.0, 0.0, 1.0, 1.0, 1.0])]);
    let [d, _] = backward(&rig, (1, 3), &[-1000.0, 1000.0, 0.0, 1.0, 1.0, 1.0], &[1.0; 3]);
    assert_eq!(d.values, [0.0, 1.0, 0.5, 0.0, 1000.0, 0.0]);
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for shape @ (t, f) in [(1, 8), (17, 11), (100, 300)] {
        let (gate_up, dy) = (gates(&mut random, t * 2 * f), random.values(t * f));
        agree(|rig| vec![forward(rig, shape, &gate_up)]);
        agree(|rig| backward(rig, shape, &gate_up, &dy).into());
    }
}
