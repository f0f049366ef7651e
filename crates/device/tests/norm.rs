//! RMS norm: gradients, accumulation, precisions.

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::DType;
use oomb_device::ops::norm::NormOps;

const EPS: f32 = 1e-3;
const SHAPES: [(usize, usize); 4] = [(1, 8), (3, 24), (17, 8), (17, 24)];

fn forward(rig: &Rig, (t, d): (usize, usize), x: &[f64], weight: &[f64]) -> [Output; 2] {
    let (mut y, mut rstd) = (rig.void(rig.act, &[t, d]), rig.void(DType::F32, &[t]));
    rig.cpu.rmsnorm_forward(&mut y, &mut rstd, &rig.activation(&[t, d], x), &rig.activation(&[d], weight), EPS);
    [Output::new(rig, "y", &y), Output::new(rig, "rstd", &rstd)]
}

struct Case {
    shape: (usize, usize),
    x: Vec<f64>,
    weight: Vec<f64>,
    dy: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    rstd: Vec<f64>,
}

impl Case {
    fn new(random: &mut Random, shape: (usize, usize)) -> Self {
        let (t, d) = shape;
        let (x, weight) = (random.values(t * d), random.values(d));
        let [_, rstd] = forward(&Rig::reference(), shape, &x, &weight);
        let [dy, dx] = [random.values(t * d), random.values(t * d)];
        Self { shape, x, weight, dy, dx, dweight: random.values(d), rstd: rstd.values }
    }

    fn backward(&self, rig: &Rig) -> [Output; 2] {
        let (t, d) = self.shape;
        let (mut dx, mut dweight) = (rig.activation(&[t, d], &self.dx), rig.tensor(DType::F32, &[d], &self.dweight));
        let [dy, x] = [&self.dy, &self.x].map(|values| rig.activation(&[t, d], values));
        let (rstd, weight) = (rig.tensor(DType::F32, &[t], &self.rstd), rig.activation(&[d], &self.weight));
        rig.cpu.rmsnorm_backward(&mut dx, Some(&mut dweight), &dy, &x, &rstd, &weight);
        [Output::new(rig, "dx", &dx), Output::new(rig, "dweight", &dweight)]
    }
}

#[test]
fn forward_is_the_formula() {
    let mut random = Random::fresh();
    for shape @ (t, d) in SHAPES {
        let (x, weight) = (random.values(t * d), random.values(d));
        let [y, rstd] = forward(&Rig::reference(), shape, &x, &weight);
        for row in 0..t {
            let x = &x[row * d..][..d];
            let scale = 1.0 / (dot(x, x) / d as f64 + f64::from(EPS)).sqrt();
            assert!((rstd.values[row] / scale - 1.0).abs() < 1e-14);
            let expected: Vec<f64> = x.iter().zip(&weight).map(|(x, w)| x * scale * w).collect();
            assert!(distance(&y.values[row * d..][..d], &expected) < 1e-14);
        }
        assert_eq!(rstd.dtype, DType::F32);
    }
}

#[test]
fn gradients_match_finite_differences_and_accumulate() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for shape in SHAPES {
        let case = Case::new(&mut random, shape);
        let [dx, dweight] = case.backward(&rig);
        let loss = |x: &[f64], weight: &[f64]| dot(&forward(&rig, shape, x, weight)[0].values, &case.dy);
        check_gradient("dx", &added(&dx.values, &case.dx), &case.x, |x| loss(x, &case.weight));
        check_gradient("dweight", &added(&dweight.values, &case.dweight), &case.weight, |weight| loss(&case.x, weight));
    }
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    // The last is more than one task.
    for shape in [(1, 8), (17, 24), (300, 200)] {
        let case = Case::new(&mut random, shape);
        agree(|rig| forward(rig, shape, &case.x, &case.weight).into());
        agree(|rig| case.backward(rig).into());
    }
}
