//! RoPE: the table far out, the split into pages and back, gradients with and without QK norm, precisions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::device::tensor_from;
use oomb_device::ops::attention::{PageRef, Pages};
use oomb_device::ops::rope::{QkNorm, QkNormGrad, RopeOps};
use oomb_device::{DType, HostData};

/// theta = 1e6, Dh = 8.
const INV_FREQ: [f64; 4] = [1.0, 0.03162277660168379, 0.001, 3.1622776601683795e-5];

/// Positions, and (cos, sin) of their products with [`INV_FREQ`], reduced and summed in 80 decimal digits.
const ANGLES: [(u32, [(f64, f64); 4]); 4] = [
    (0, [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]),
    (
        1,
        [
            (0.5403023058681398, 0.8414709848078965),
            (0.9995000416652778, 0.03161750640243371),
            (0.9999995000000417, 0.0009999998333333417),
            (0.9999999995, 3.162277659641333e-05),
        ],
    ),
    (
        1_000_000,
        [
            (0.9367521275331447, -0.34999350217129294),
            (0.8799452654455824, -0.4750750780875625),
            (0.5623790762906857, 0.8268795405320143),
            (0.9786826965598918, 0.20537813772224786),
        ],
    ),
    (
        4_194_304,
        [
            (0.22163633077774125, 0.975129394941707),
            (-0.8031994099445344, -0.5957102549602045),
            (-0.9616590492829044, -0.2742478312262478),
            (0.7721065812525798, 0.6354930583306582),
        ],
    ),
];

fn table(rig: &Rig, positions: &[u32], inv_freq: &[f64], scale: f32) -> Output {
    let shape = [positions.len(), inv_freq.len(), 2];
    let mut table = rig.void(DType::F32, &shape);
    let positions = tensor_from(&rig.cpu, DType::U32, &[positions.len()], HostData::U32(positions)).unwrap();
    let inv_freq = rig.tensor(DType::F64, &[inv_freq.len()], inv_freq);
    rig.cpu.rope_table(&mut table, &positions, &inv_freq, scale);
    Output::new(rig, "table", &table)
}

#[test]
fn angles_are_exact_far_out() {
    let positions = ANGLES.map(|(position, _)| position);
    let expected: Vec<f64> = ANGLES.iter().flat_map(|(_, row)| row.iter().flat_map(|&(cos, sin)| [cos, sin])).collect();
    // An f64 product of 4e6 is off by at most 5e-10 in angle; half an ulp of f32 below 1 adds 3e-8, far below the 1e-6
    // that a wrong angle of f32 (0.25 at this position) would have to hide in.
    for (rig, allowed) in [(Rig::reference(), 5e-10), (Rig { cpu: Default::default(), act: DType::F32 }, 3.1e-8)] {
        for (got, expected) in table(&rig, &positions, &INV_FREQ, 1.0).values.iter().zip(&expected) {
            assert!((got - expected).abs() <= allowed, "{got} for {expected}");
        }
    }
    let scaled = table(&Rig::reference(), &positions, &INV_FREQ, 1.25).values;
    assert!(distance(&scaled, &expected.iter().map(|x| 1.25 * x).collect::<Vec<_>>()) < 1e-9);
    agree(|rig| vec![table(rig, &positions, &INV_FREQ, 1.25)]);
}

const EPS: f32 = 1e-3;
/// P.
const PAGE: usize = 4;
const SLOTS: usize = 7;

/// T, H, G, Dh.
type Shape = (usize, usize, usize, usize);
const SHAPES: [Shape; 4] = [(1, 3, 1, 4), (3, 3, 1, 16), (17, 3, 1, 4), (7, 4, 2, 8)];

#[derive(Clone, Copy, PartialEq)]
enum Norm {
    Off,
    On,
}

struct Case {
    shape: Shape,
    norm: Norm,
    qkv: Vec<f64>,
    table: Vec<f64>,
    weights: [Vec<f64>; 2],
    refs: Vec<PageRef>,
    slab: Vec<f64>,
    dq: Vec<f64>,
    dweights: [Vec<f64>; 2],
}

impl Case {
    fn new(random: &mut Random, shape @ (t, h, g, dh): Shape, norm: Norm) -> Self {
        // Slots in random order.
        let keys = random.values(SLOTS);
        let mut slots: Vec<u32> = (0..SLOTS as u32).collect();
        slots.sort_by(|&a, &b| keys[a as usize].total_cmp(&keys[b as usize]));
        let refs = slots.iter().zip(0..t.div_ceil(PAGE) as u32).map(|(&slot, index)| PageRef { slot, index }).collect();
        let positions: Vec<u32> = (0..t as u32).map(|t| 1000 + t).collect();
        let inv_freq: Vec<f64> = (0..dh / 2).map(|d| 10f64.powi(-(d as i32))).collect();
        let table = table(&Rig::reference(), &positions, &inv_freq, 1.25).values;
        // As an f32 device holds it, so that all start from the same numbers.
        let table = table.iter().map(|&x| f64::from(x as f32)).collect();
        let mut values = |len| random.values(len);
        Self {
            shape,
            norm,
            qkv: values(t * (h + 2 * g) * dh),
            table,
            weights: [values(dh), values(dh)],
            refs,
            slab: values(SLOTS * 2 * g * PAGE * dh),
            dq: values(t * h * dh),
            dweights: [values(dh), values(dh)],
        }
    }

    /// q and the whole slab, with `qkv` and the norms' weights given.
    fn forward(&self, rig: &Rig, qkv: &[f64], weights: &[Vec<f64>; 2]) -> [Output; 2] {
        let (t, h, g, dh) = self.shape;
        let mut q = rig.void(rig.act, &[t, h, dh]);
        let slab = rig.activation(&[SLOTS, 2, g, PAGE, dh], &self.slab);
        let [q_weight, k_weight] = weights.each_ref().map(|weight| rig.activation(&[dh], weight));
        let norm = (self.norm == Norm::On).then_some(QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: EPS });
        let table = rig.tensor(DType::F32, &[t, dh / 2, 2], &self.table);
        let pages = Pages { slab: &slab, refs: &self.refs };
        rig.cpu.qkv_forward(&mut q, Some(pages), 0, &rig.activation(&[t, (h + 2 * g) * dh], qkv), norm, &table);
        [Output::new(rig, "q", &q), Output::new(rig, "slab", &slab)]
    }

    /// The gradient of qkv and, with the norm, those of its weights. The slab plays the gradients of k and v.
    fn backward(&self, rig: &Rig, slab_dtype: DType) -> Vec<Output> {
        let (t, h, g, dh) = self.shape;
        let mut qkv = rig.activation(&[t, (h + 2 * g) * dh], &self.qkv);
        let dq = rig.tensor(DType::F32, &[t, h, dh], &self.dq);
        let slab = rig.tensor(slab_dtype, &[SLOTS, 2, g, PAGE, dh], &self.slab);
        let [q_weight, k_weight] = self.weights.each_ref().map(|weight| rig.activation(&[dh], weight));
        let [mut dq_weight, mut dk_weight] = self.dweights.each_ref().map(|start| rig.tensor(DType::F32, &[dh], start));
        let norm = QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: EPS };
        let grad = QkNormGrad { dq_weight: &mut dq_weight, dk_weight: &mut dk_weight };
        let norm = (self.norm == Norm::On).then_some((norm, Some(grad)));
        let table = rig.tensor(DType::F32, &[t, dh / 2, 2], &self.table);
        rig.cpu.qkv_backward(&mut qkv, &dq, Pages { slab: &slab, refs: &self.refs }, norm, &table);
        let weights = [Output::new(rig, "dq_weight", &dq_weight), Output::new(rig, "dk_weight", &dk_weight)];
        [Output::new(rig, "dqkv", &qkv)].into_iter().chain(weights).collect()
    }

    /// Where row `t`, KV head `g` of k (0) or v (1) starts in the slab.
    fn slab_row(&self, t: usize, half: usize, head: usize) -> usize {
        let (_, _, g, dh) = self.shape;
        (((self.refs[t / PAGE].slot as usize * 2 + half) * g + head) * PAGE + t % PAGE) * dh
    }

    /// The elements of the slab that hold rows of the chunk.
    fn is_row(&self) -> Vec<bool> {
        let (t, _, g, dh) = self.shape;
        let mut is_row = vec![false; self.slab.len()];
        for (t, head) in (0..t).flat_map(|t| (0..g).map(move |head| (t, head))) {
            for half in 0..2 {
                is_row[self.slab_row(t, half, head)..][..dh].fill(true);
            }
        }
        is_row
    }
}

/// Every head normed and rotated by complex multiplication, from the definition.
fn rotated(case: &Case, t: usize, head: usize, weight: &[f64]) -> Vec<f64> {
    let (_, h, g, dh) = case.shape;
    let x = &case.qkv[(t * (h + 2 * g) + head) * dh..][..dh];
    let rstd = 1.0 / (dot(x, x) / dh as f64 + f64::from(EPS)).sqrt();
    let x: Vec<f64> = x.iter().zip(weight).map(|(x, w)| if case.norm == Norm::On { x * rstd * w } else { *x }).collect();
    let angle = |d: usize| (case.table[(t * dh / 2 + d) * 2], case.table[(t * dh / 2 + d) * 2 + 1]);
    let low = (0..dh / 2).map(|d| x[d] * angle(d).0 - x[d + dh / 2] * angle(d).1);
    let high = (0..dh / 2).map(|d| x[d + dh / 2] * angle(d).0 + x[d] * angle(d).1);
    low.chain(high).collect()
}

#[test]
fn forward_is_the_formula_and_leaves_other_rows() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (shape @ (t, h, g, dh), norm) in SHAPES.iter().flat_map(|&shape| [(shape, Norm::Off), (shape, Norm::On)]) {
        let case = Case::new(&mut random, shape, norm);
        let [q, slab] = case.forward(&rig, &case.qkv, &case.weights);
        for t in 0..t {
            for head in 0..h {
                let expected = rotated(&case, t, head, &case.weights[0]);
                assert!(distance(&q.values[(t * h + head) * dh..][..dh], &expected) < 1e-14);
            }
            for head in 0..g {
                let k = &slab.values[case.slab_row(t, 0, head)..][..dh];
                assert!(distance(k, &rotated(&case, t, h + head, &case.weights[1])) < 1e-14);
                let v = &slab.values[case.slab_row(t, 1, head)..][..dh];
                assert_eq!(v, &case.qkv[(t * (h + 2 * g) + h + g + head) * dh..][..dh]);
            }
        }
        let others = slab.values.iter().zip(&case.slab).zip(case.is_row());
        assert!(others.filter(|(_, is_row)| !is_row).all(|((end, start), _)| end == start), "rows of others were written");
    }
}

#[test]
fn without_pages_only_q_is_stored() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    let case = Case::new(&mut random, SHAPES[2], Norm::Off);
    let (t, h, g, dh) = case.shape;
    let mut q = rig.void(rig.act, &[t, h, dh]);
    let (qkv, table) = (rig.activation(&[t, (h + 2 * g) * dh], &case.qkv), rig.tensor(DType::F32, &[t, dh / 2, 2], &case.table));
    rig.cpu.qkv_forward(&mut q, None, 0, &qkv, None, &table);
    assert_eq!(rig.get(&q), case.forward(&rig, &case.qkv, &case.weights)[0].values);
}

/// A chunk whose pages are filled in two calls, the second from within a page, is the chunk filled in one.
#[test]
fn pages_go_on_where_they_ended() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (shape, norm) in SHAPES.iter().flat_map(|&shape| [(shape, Norm::Off), (shape, Norm::On)]) {
        let case = Case::new(&mut random, shape, norm);
        let (t, h, g, dh) = case.shape;
        let wanted = case.forward(&rig, &case.qkv, &case.weights);
        let [q_weight, k_weight] = case.weights.each_ref().map(|weight| rig.activation(&[dh], weight));
        for cut in 1..t {
            let slab = rig.activation(&[SLOTS, 2, g, PAGE, dh], &case.slab);
            let mut queries = Vec::new();
            for rows in [0..cut, cut..t] {
                let width = (h + 2 * g) * dh;
                let qkv = rig.activation(&[rows.len(), width], &case.qkv[rows.start * width..rows.end * width]);
                let angles = &case.table[rows.start * dh..rows.end * dh];
                let table = rig.tensor(DType::F32, &[rows.len(), dh / 2, 2], angles);
                let mut q = rig.void(rig.act, &[rows.len(), h, dh]);
                let norm = (case.norm == Norm::On).then_some(QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: EPS });
                let pages = Pages { slab: &slab, refs: &case.refs[rows.start / PAGE..rows.end.div_ceil(PAGE)] };
                rig.cpu.qkv_forward(&mut q, Some(pages), rows.start % PAGE, &qkv, norm, &table);
                queries.extend(rig.get(&q));
            }
            assert_eq!(queries, wanted[0].values, "{shape:?} cut at {cut}");
            assert_eq!(rig.get(&slab), wanted[1].values, "{shape:?} cut at {cut}");
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (shape, norm) in SHAPES.iter().flat_map(|&shape| [(shape, Norm::Off), (shape, Norm::On)]) {
        let case = Case::new(&mut random, shape, norm);
        // The gradient of k and v in pages: the slab's rows of the chunk.
        let is_row = case.is_row();
        let loss = |qkv: &[f64], weights: &[Vec<f64>; 2]| {
            let [q, slab] = case.forward(&rig, qkv, weights);
            let pages = slab.values.iter().zip(&case.slab).zip(&is_row);
            let pages: f64 = pages.map(|((x, dx), &is_row)| if is_row { x * dx } else { 0.0 }).sum();
            dot(&q.values, &case.dq) + pages
        };
        let gradients = case.backward(&rig, DType::F32);
        check_gradient("dqkv", &gradients[0].values, &case.qkv, |qkv| loss(qkv, &case.weights));
        let [q_weight, k_weight] = &case.weights;
        let changed = [0, 1].map(|i| added(&gradients[1 + i].values, &case.dweights[i]));
        if norm == Norm::Off {
            assert!(changed.iter().flatten().all(|&x| x == 0.0));
        } else {
            check_gradient("dq_weight", &changed[0], q_weight, |w| loss(&case.qkv, &[w.to_vec(), k_weight.clone()]));
            check_gradient("dk_weight", &changed[1], k_weight, |w| loss(&case.qkv, &[q_weight.clone(), w.to_vec()]));
        }
    }
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for (shape, norm) in [(SHAPES[2], Norm::Off), (SHAPES[3], Norm::On), ((25, 12, 4, 64), Norm::On)] {
        let case = Case::new(&mut random, shape, norm);
        agree(|rig| case.forward(rig, &case.qkv, &case.weights).into());
        agree(|rig| case.backward(rig, DType::F32));
        agree(|rig| case.backward(rig, DType::Bf16));
    }
}
