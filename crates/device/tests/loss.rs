//! Cross entropy: values, gradients, ignored labels, large logits, precisions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::device::tensor_from;
use oomb_device::ops::loss::{IGNORE, LossOps};
use oomb_device::{DType, HostData};

const V: usize = 11;
const WEIGHT: f32 = 0.125;

fn forward(rig: &Rig, v: usize, logits: &[f64], labels: &[u32]) -> Output {
    let t = labels.len();
    let mut loss = rig.void(DType::F32, &[t]);
    let labels = tensor_from(&rig.cpu, DType::U32, &[t], HostData::U32(labels)).unwrap();
    rig.cpu.cross_entropy_forward(&mut loss, &rig.activation(&[t, v], logits), &labels);
    Output::new(rig, "loss", &loss)
}

fn backward(rig: &Rig, v: usize, logits: &[f64], labels: &[u32]) -> [Output; 2] {
    let t = labels.len();
    let (mut loss, mut dlogits) = (rig.void(DType::F32, &[t]), rig.activation(&[t, v], logits));
    let labels = tensor_from(&rig.cpu, DType::U32, &[t], HostData::U32(labels)).unwrap();
    rig.cpu.cross_entropy_backward(&mut loss, &mut dlogits, &labels, WEIGHT);
    [Output::new(rig, "loss", &loss), Output::new(rig, "dlogits", &dlogits)]
}

/// Logits within ±4 and labels of which the second is to be ignored.
fn inputs(random: &mut Random, t: usize, v: usize) -> (Vec<f64>, Vec<u32>) {
    let logits = random.values(t * v).iter().map(|x| 4.0 * x).collect();
    let unit = random.values(t);
    let labels = unit.iter().map(|x| ((x + 1.0) / 2.0 * v as f64) as u32);
    let labels = labels.enumerate().map(|(row, label)| if row == 1 { IGNORE } else { label }).collect();
    (logits, labels)
}

#[test]
fn loss_is_the_formula() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for t in [1, 3, 17] {
        let (logits, labels) = inputs(&mut random, t, V);
        let row = |row: usize| {
            let logits = &logits[row * V..][..V];
            let total: f64 = logits.iter().map(|x| x.exp()).sum();
            if labels[row] == IGNORE { 0.0 } else { total.ln() - logits[labels[row] as usize] }
        };
        let expected: Vec<f64> = (0..t).map(row).collect();
        assert!(distance(&forward(&rig, V, &logits, &labels).values, &expected) < 1e-12);
        assert!(distance(&backward(&rig, V, &logits, &labels)[0].values, &expected) < 1e-12);
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for t in [1, 3, 17] {
        let (logits, labels) = inputs(&mut random, t, V);
        let [_, dlogits] = backward(&rig, V, &logits, &labels);
        let weights = vec![f64::from(WEIGHT); t];
        check_gradient("dlogits", &dlogits.values, &logits, |x| dot(&forward(&rig, V, x, &labels).values, &weights));
        if t > 1 {
            assert_eq!(dlogits.values[V..2 * V], [0.0; V], "a row without a label");
        }
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let rig = Rig::reference();
    let logits = [900.0, -900.0, 0.0, -900.0, -900.0, -900.0];
    let losses = [forward(&rig, 3, &logits, &[1, 0]).values, backward(&rig, 3, &logits, &[1, 0])[0].values.clone()];
    for loss in losses {
        assert!(distance(&added(&loss, &[0.0, 0.0]), &[1800.0, 3f64.ln()]) < 1e-14);
    }
    agree(|rig| backward(rig, 3, &logits, &[1, 0]).into());
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for (t, v) in [(1, V), (17, V), (40, 5000)] {
        let (logits, labels) = inputs(&mut random, t, v);
        agree(|rig| vec![forward(rig, v, &logits, &labels)]);
        agree(|rig| backward(rig, v, &logits, &labels).into());
    }
}
