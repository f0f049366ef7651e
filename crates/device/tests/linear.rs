//! Linear layers: epilogues, gradients, overwriting and accumulating, precisions.

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::DType;
use oomb_device::ops::linear::{Columns, Epilogue, LinearOps, Write};

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

    /// dw added to what was there, dbias, and dw over what was there.
    fn backward_parameters(&self, rig: &Rig) -> [Output; 3] {
        let (t, n, k) = self.shape;
        let mut over = rig.void(DType::F32, &[n, k]);
        let (mut dw, mut dbias) = (rig.tensor(DType::F32, &[n, k], &self.start[1]), rig.tensor(DType::F32, &[n], &self.start[2]));
        let dy = rig.activation(&[t, n], &self.dy);
        rig.cpu.linear_backward_weight(&mut dw, &dy, &rig.activation(&[t, k], &self.x), Write::Accumulate);
        rig.cpu.linear_backward_weight(&mut over, &dy, &rig.activation(&[t, k], &self.x), Write::Overwrite);
        rig.cpu.linear_backward_bias(&mut dbias, &dy);
        [Output::new(rig, "dw", &dw), Output::new(rig, "dbias", &dbias), Output::new(rig, "dw over", &over)]
    }
}

/// A product with some columns of a wider matrix.
struct Part {
    case: Case,
    /// N of the wider matrix.
    width: usize,
    columns: Columns,
    wide: Vec<f64>,
}

impl Part {
    /// All of `shape`'s N columns of a matrix with `left` more before and `right` after.
    fn new(random: &mut Random, shape: Shape, left: usize, right: usize) -> Self {
        let (t, n, _) = shape;
        let width = left + n + right;
        let columns = Columns { range: left..left + n, scale: 0.75 };
        Self { case: Case::new(random, shape), width, columns, wide: random.values(t * width) }
    }

    fn forward(&self, rig: &Rig, x: &[f64], w: &[f64]) -> Output {
        let (t, n, k) = self.case.shape;
        let mut y = rig.activation(&[t, self.width], &self.wide);
        rig.cpu.linear_columns_forward(&mut y, &rig.activation(&[t, k], x), &rig.activation(&[n, k], w), &self.columns);
        Output::new(rig, "y", &y)
    }

    /// The wide matrix plays the output's gradient.
    fn backward(&self, rig: &Rig) -> [Output; 2] {
        let (t, n, k) = self.case.shape;
        let (mut dx, mut dw) = (rig.void(rig.act, &[t, k]), rig.tensor(DType::F32, &[n, k], &self.case.start[1]));
        let [x, dy] = [(k, &self.case.x), (self.width, &self.wide)].map(|(width, values)| rig.activation(&[t, width], values));
        rig.cpu.linear_columns_backward(&mut dx, &mut dw, &dy, &x, &rig.activation(&[n, k], &self.case.w), &self.columns);
        [Output::new(rig, "dx", &dx), Output::new(rig, "dw", &dw)]
    }
}

#[test]
fn columns_are_the_formula_and_the_others_stay() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (shape @ (t, n, k), left, right) in [((1, 8, 24), 0, 3), ((17, 11, 8), 5, 2), ((3, 4, 1), 7, 0), ((5, 3, 2), 0, 0)] {
        let part = Part::new(&mut random, shape, left, right);
        let (x, w) = (&part.case.x, &part.case.w);
        let mut expected = part.wide.clone();
        for (row, column) in (0..t).flat_map(|row| (0..n).map(move |column| (row, column))) {
            expected[row * part.width + left + column] += 0.75 * dot(&x[row * k..][..k], &w[column * k..][..k]);
        }
        assert!(distance(&part.forward(&rig, x, w).values, &expected) < 1e-14);
        let loss = |x: &[f64], w: &[f64]| dot(&part.forward(&rig, x, w).values, &part.wide);
        let [dx, dw] = part.backward(&rig);
        check_gradient("dx", &dx.values, x, |x| loss(x, w));
        check_gradient("dw", &added(&dw.values, &part.case.start[1]), w, |w| loss(x, w));
    }
}

#[test]
fn precisions_of_columns_agree() {
    let mut random = Random::fresh();
    for (shape, left, right) in [((1, 8, 24), 2, 3), ((130, 200, 16), 96, 40)] {
        let part = Part::new(&mut random, shape, left, right);
        agree(|rig| vec![part.forward(rig, &part.case.x, &part.case.w)]);
        agree(|rig| part.backward(rig).into());
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
        let [dw, dbias, over] = case.backward_parameters(&rig);
        check_gradient("dw", &added(&dw.values, &case.start[1]), &case.w, |w| loss(&case.x, w));
        assert!(distance(&added(&dw.values, &case.start[1]), &over.values) < 1e-12);
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
