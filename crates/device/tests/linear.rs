//! Linear layers: epilogues, gradients, overwriting and accumulating, precisions.

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::DType;
use oomb_device::ops::linear::{Epilogue, LinearOps, Write};

/// T, N, K.
type Shape = (usize, usize, usize);
const SHAPES: [Shape; 4] = [(1, 8, 24), (3, 24, 8), (17, 11, 8), (17, 1, 3)];

#[derive(Clone, Copy)]
enum Added {
    Nothing,
    Bias,
    Residual,
    Itself,
}

const EPILOGUES: [Added; 4] = [Added::Nothing, Added::Bias, Added::Residual, Added::Itself];

struct Case {
    shape: Shape,
    x: Vec<f64>,
    w: Vec<f64>,
    dy: Vec<f64>,
    bias: Vec<f64>,
    residual: Vec<f64>,
    start: [Vec<f64>; 3],
}

impl Case {
    fn new(random: &mut Random, shape @ (t, n, k): Shape) -> Self {
        let mut values = |len| random.values(len);
        let [x, w, dy] = [values(t * k), values(n * k), values(t * n)];
        let (bias, residual) = (values(n), values(t * n));
        Self { shape, x, w, dy, bias, residual, start: [values(t * k), values(n * k), values(n)] }
    }

    fn forward(&self, rig: &Rig, x: &[f64], w: &[f64], epilogue: Added) -> Output {
        let (t, n, k) = self.shape;
        let (x, w) = (rig.activation(&[t, k], x), rig.activation(&[n, k], w));
        let (bias, residual) = (rig.activation(&[n], &self.bias), rig.activation(&[t, n], &self.residual));
        let mut y = rig.void(rig.act, &[t, n]);
        match epilogue {
            Added::Nothing => rig.cpu.linear_forward(&mut y, &x, &w, Epilogue::None),
            Added::Bias => rig.cpu.linear_forward(&mut y, &x, &w, Epilogue::Bias(&bias)),
            Added::Residual => rig.cpu.linear_forward(&mut y, &x, &w, Epilogue::Residual(&residual)),
            Added::Itself => {
                y = residual.clone();
                rig.cpu.linear_forward(&mut y, &x, &w, Epilogue::Residual(&residual));
            }
        }
        Output::new(rig, "y", &y)
    }

    fn backward_input(&self, rig: &Rig, write: Write) -> Output {
        let (t, n, k) = self.shape;
        let mut dx = rig.activation(&[t, k], &self.start[0]);
        if write == Write::Overwrite {
            dx = rig.void(rig.act, &[t, k]);
        }
        rig.cpu.linear_backward_input(&mut dx, &rig.activation(&[t, n], &self.dy), &rig.activation(&[n, k], &self.w), write);
        Output::new(rig, "dx", &dx)
    }

    fn backward_parameters(&self, rig: &Rig) -> [Output; 2] {
        let (t, n, k) = self.shape;
        let (mut dw, mut dbias) = (rig.tensor(DType::F32, &[n, k], &self.start[1]), rig.tensor(DType::F32, &[n], &self.start[2]));
        let dy = rig.activation(&[t, n], &self.dy);
        rig.cpu.linear_backward_weight(&mut dw, &dy, &rig.activation(&[t, k], &self.x));
        rig.cpu.linear_backward_bias(&mut dbias, &dy);
        [Output::new(rig, "dw", &dw), Output::new(rig, "dbias", &dbias)]
    }
}

#[test]
fn forward_is_the_formula() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for shape @ (t, n, k) in SHAPES {
        let case = Case::new(&mut random, shape);
        for epilogue in EPILOGUES {
            let mut expected = Vec::new();
            for (row, column) in (0..t).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let product = dot(&case.x[row * k..][..k], &case.w[column * k..][..k]);
                expected.push(match epilogue {
                    Added::Nothing => product,
                    Added::Bias => product + case.bias[column],
                    Added::Residual | Added::Itself => product + case.residual[row * n + column],
                });
            }
            assert!(distance(&case.forward(&rig, &case.x, &case.w, epilogue).values, &expected) < 1e-14);
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for shape in SHAPES {
        let case = Case::new(&mut random, shape);
        let loss = |x: &[f64], w: &[f64]| dot(&case.forward(&rig, x, w, Added::Bias).values, &case.dy);
        let dx = case.backward_input(&rig, Write::Overwrite).values;
        check_gradient("dx", &dx, &case.x, |x| loss(x, &case.w));
        let accumulated = added(&case.backward_input(&rig, Write::Accumulate).values, &case.start[0]);
        assert!(distance(&accumulated, &dx) < 1e-12);
        let [dw, dbias] = case.backward_parameters(&rig);
        check_gradient("dw", &added(&dw.values, &case.start[1]), &case.w, |w| loss(&case.x, w));
        let (t, n, _) = shape;
        let columns: Vec<f64> = (0..n).map(|column| (0..t).map(|row| case.dy[row * n + column]).sum()).collect();
        assert!(distance(&added(&dbias.values, &case.start[2]), &columns) < 1e-12);
    }
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for shape in [(1, 8, 24), (17, 11, 8), (130, 200, 96)] {
        let case = Case::new(&mut random, shape);
        for epilogue in EPILOGUES {
            agree(|rig| vec![case.forward(rig, &case.x, &case.w, epilogue)]);
        }
        agree(|rig| vec![case.backward_input(rig, Write::Overwrite), case.backward_input(rig, Write::Accumulate)]);
        agree(|rig| case.backward_parameters(rig).into());
    }
}
