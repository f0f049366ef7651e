//! Moments in 8 bits and in bf16, and bf16 weights without masters: how far what is stored is from what was computed, that its
//! mean is right, and that nothing depends on how a tensor is cut.

use crate::common::{Random, Rig};
use oomb_device::cpu::{Cpu, Real};
use oomb_device::device::new_tensor;
use oomb_device::ops::moments::{BLOCK_ELEMENTS, RANDOM_BITS, SmallFloat};
use oomb_device::ops::optim::{AdamW, AdamWState, Moment, OptimOps, RandomBits};
use oomb_device::{DType, Device, Tensor};

const BOTH: [SmallFloat; 2] = [SmallFloat::Signed, SmallFloat::Unsigned];
const HIGHEST: u32 = (1 << RANDOM_BITS) - 1;

/// Largest over smallest value above 0.
fn span(format: SmallFloat) -> f32 {
    if format == SmallFloat::Signed { 15.0 * 2f32.powi(14) } else { 15.0 * 2f32.powi(30) }
}

#[test]
fn every_code_is_a_value_of_its_own_and_comes_back() {
    for format in BOTH {
        for scale in [1.0, 2f32.powi(-126), 2f32.powi(-40), 2f32.powi(90)] {
            let values: Vec<f32> = (0..=255).map(|code| format.decode(code, scale)).collect();
            let positive = if format == SmallFloat::Signed { &values[..128] } else { &values[..] };
            assert!(positive.windows(2).all(|pair| pair[0] < pair[1]), "{format:?} {scale:e}");
            assert_eq!((positive[1], positive[positive.len() - 1]), (scale, scale * span(format)), "{format:?}");
            for (code, &value) in (0..=255).zip(&values) {
                for random in [0, 1, HIGHEST / 2, HIGHEST] {
                    assert_eq!(format.decode(format.encode(value, scale, random), scale), value, "{format:?} {code}");
                }
            }
        }
    }
}

#[test]
fn rounding_is_within_an_eighth_and_right_in_the_mean() {
    let mut random = Random::fresh();
    for format in BOTH {
        for x in random.values(2000) {
            // From the largest down to below the scale.
            let x = (x as f32).abs() * 2f32.powi((x * 1e4) as i32 % 40 - 39);
            let scale = format.scale(0.99);
            let draws = 1u32 << 10;
            let of = |draw: u32| format.decode(format.encode(x, scale, draw << (RANDOM_BITS - 10)), scale);
            let step = (x / 8.0).max(scale);
            assert!((0..draws).all(|draw| (of(draw) - x).abs() <= step), "{format:?} {x:e}");
            let mean = (0..draws).map(|draw| f64::from(of(draw))).sum::<f64>() / f64::from(draws);
            let wanted = if format == SmallFloat::Unsigned { x.max(scale.min(x * 1e30)) } else { x };
            // The draws are a thousandth apart.
            assert!((mean - f64::from(wanted)).abs() <= f64::from(step) * 1.1e-3, "{format:?} {x:e}: {mean:e}");
            assert_eq!(format.decode(format.encode(0.0, scale, HIGHEST), scale), 0.0);
        }
    }
    assert_eq!(SmallFloat::Unsigned.encode(1e-30, 1.0, 0), 1, "a divisor stays above 0");
    assert_eq!(SmallFloat::Signed.decode(SmallFloat::Signed.encode(-3.0, 1.0, 0), 1.0), -3.0);
}

#[test]
fn scales_are_the_smallest_powers_of_two_that_hold_a_block() {
    for format in BOTH {
        for i in 0..100_000u32 {
            let largest = f32::from_bits(0x0880_0000 + i * 18_000);
            let scale = format.scale(largest);
            assert_eq!(scale.to_bits() << 9, 0, "a power of two");
            assert!(largest <= scale * span(format), "{format:?} {largest:e}");
            assert!(largest >= scale * span(format) * 0.4 || scale == 2f32.powi(-126), "{format:?} {largest:e}: {scale:e}");
            let rounded = format.decode(format.encode(largest, scale, HIGHEST), scale);
            assert!(rounded >= largest && rounded <= largest * 1.125, "{format:?} {largest:e}: {rounded:e}");
        }
        assert_eq!(format.scale(0.0), 2f32.powi(-126));
    }
}

/// How moments are stored, and what that may be off by, relative to the value.
const KINDS: [(DType, f64); 3] = [(DType::F32, 1e-6), (DType::Bf16, 1.0 / 128.0), (DType::U8, 1.0 / 8.0)];

/// A parameter with its state.
struct Param {
    w: Tensor<Cpu>,
    master: Option<Tensor<Cpu>>,
    /// Values and scales of both moments.
    moments: [(Tensor<Cpu>, Option<Tensor<Cpu>>); 2],
}

impl Param {
    fn new(rig: &Rig, w: &[f64], dtype: DType, with_master: bool) -> Self {
        let len = [w.len()];
        let moment = || {
            let (mut values, mut scales) = (new_tensor(&rig.cpu, dtype, &len).expect("memory"), None);
            rig.cpu.fill(&mut values, 0.0);
            if dtype == DType::U8 {
                scales = Some(rig.tensor(DType::F32, &[len[0].div_ceil(BLOCK_ELEMENTS)], &vec![1.0; len[0].div_ceil(256)]));
            }
            (values, scales)
        };
        let master = with_master.then(|| rig.tensor(DType::F32, &len, w));
        Self { w: rig.activation(&len, w), master, moments: [moment(), moment()] }
    }

    /// Updates elements from `start` to `end`.
    fn update(&mut self, rig: &Rig, grad: &Tensor<Cpu>, hyper: AdamW, seed: u64, (start, end): (usize, usize)) {
        let part = |x: &Tensor<Cpu>| x.narrow(start..end);
        let blocks = start / BLOCK_ELEMENTS..end.div_ceil(BLOCK_ELEMENTS);
        let mut views =
            self.moments.each_ref().map(|(x, scales)| (part(x), scales.as_ref().map(|scales| scales.narrow(blocks.clone()))));
        let [m, v] = views.each_mut().map(|(values, scales)| Moment { values, scales: scales.as_mut() });
        let mut master = self.master.as_ref().map(part);
        let random = RandomBits { seed, first: start as u64 };
        rig.cpu.adamw(&mut part(&self.w), AdamWState { master: master.as_mut(), m, v, random }, &part(grad), hyper, None);
    }

    fn moment(&self, rig: &Rig, index: usize) -> Vec<f64> {
        let (values, scales) = &self.moments[index];
        let Some(scales) = scales else { return rig.get(values) };
        let (scales, format) = (rig.get(scales), BOTH[index]);
        let codes = rig.cpu.download_u8(values).expect("the device works");
        codes.iter().enumerate().map(|(i, &code)| f64::from(format.decode(code, scales[i / BLOCK_ELEMENTS] as f32))).collect()
    }

    /// Every stored bit that an update may change.
    fn all(&self, rig: &Rig) -> Vec<Vec<f64>> {
        let master = self.master.as_ref().map_or(vec![], |master| rig.get(master));
        vec![rig.get(&self.w), master, self.moment(rig, 0), self.moment(rig, 1)]
    }
}

const HYPER: AdamW = AdamW { lr: 0.01, beta1: 0.75, beta2: 0.875, eps: 1e-3, weight_decay: 0.25, step: 1 };

/// Three updates, each from the state that was stored: the weight is changed by what was computed, and what is stored is that
/// within the rounding of its kind.
#[test]
fn states_are_what_was_computed_rounded_once() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (dtype, allowed) in KINDS {
        for len in [1, 255, 257, 40_000] {
            let w = random.values(len);
            let mut param = Param::new(&rig, &w, dtype, true);
            for step in 1..=3 {
                let grad = random.values(len);
                let before = param.all(&rig);
                param.update(&rig, &rig.tensor(DType::F32, &[len], &grad), AdamW { step, ..HYPER }, 9, (0, len));
                let after = param.all(&rig);
                for i in 0..len {
                    let m = 0.75 * before[2][i] + 0.25 * grad[i];
                    let v = 0.875 * before[3][i] + 0.125 * grad[i] * grad[i];
                    let corrected = (m / (1.0 - 0.75f64.powi(step as i32)), v / (1.0 - 0.875f64.powi(step as i32)));
                    let [lr, eps, decay] = [HYPER.lr, HYPER.eps, HYPER.weight_decay].map(f64::from);
                    let wanted = before[1][i] * (1.0 - lr * decay) - lr * corrected.0 / (corrected.1.sqrt() + eps);
                    assert!((after[1][i] - wanted).abs() < 1e-12, "{dtype:?} {len} element {i}");
                    // Beside the relative error: the smallest value of a code, in a block whose largest is below 1.
                    let floor = if dtype == DType::U8 { 2f64.powi(-17) } else { 0.0 };
                    assert!((after[2][i] - m).abs() <= allowed * m.abs() + floor, "{dtype:?} m: {} for {m}", after[2][i]);
                    let floor = floor * 2f64.powi(-16);
                    assert!((after[3][i] - v).abs() <= allowed * v + floor, "{dtype:?} v: {} for {v}", after[3][i]);
                }
            }
        }
    }
}

/// Element by element the same, however the tensor is cut at blocks, for every kind of state; and another seed is other bits.
#[test]
fn pieces_seeds_and_bits() {
    let (mut random, rig) = (Random::fresh(), Rig::new(Real::F32, DType::Bf16));
    let len = 40_000;
    let (w, grad) = (random.values(len), random.values(len));
    for (dtype, _) in KINDS {
        for with_master in [false, true] {
            let run = |cuts: &[usize], seed: u64| {
                let mut param = Param::new(&rig, &w, dtype, with_master);
                let grad = rig.tensor(DType::F32, &[len], &grad);
                for step in 1..=2 {
                    for cut in cuts.windows(2) {
                        let hyper = AdamW { step, ..HYPER };
                        param.update(&rig, &grad, hyper, seed + u64::from(step), (cut[0], cut[1]));
                    }
                }
                param.all(&rig)
            };
            let whole = run(&[0, len], 5);
            assert!(whole == run(&[0, 256, 16_640, 33_024, len], 5), "{dtype:?} {with_master}");
            let rounds = dtype != DType::F32 || !with_master;
            assert_eq!(whole != run(&[0, len], 6), rounds, "{dtype:?} {with_master}");
        }
    }
}

/// Rounded to nearest, neither would ever move: a step of a fiftieth of bf16's last place, and a second moment that grows by a
/// thousandth of its goal.
#[test]
fn small_steps_are_taken_in_the_mean() {
    let rig = Rig::new(Real::F32, DType::Bf16);
    let len = 1 << 16;
    let grad = rig.tensor(DType::F32, &[len], &vec![1.0; len]);
    for (dtype, _) in KINDS {
        let mut param = Param::new(&rig, &vec![1.0; len], dtype, false);
        let steps = 100;
        for step in 1..=steps {
            let hyper = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, step };
            param.update(&rig, &grad, hyper, u64::from(step) << 32, (0, len));
        }
        let mean = |values: &[f64]| values.iter().sum::<f64>() / len as f64;
        let [w, v] = [mean(&rig.get(&param.w)), mean(&param.moment(&rig, 1))];
        // Each step is lr. Single weights are off by some 0.005, their mean by a 256th of that; rounding of v changes the steps.
        assert!((w - (1.0 - 1e-4 * f64::from(steps))).abs() < 2e-4, "{dtype:?}: {w}");
        let wanted = 1.0 - 0.999f64.powi(steps as i32);
        assert!((v / wanted - 1.0).abs() < 0.01, "{dtype:?}: {v} for {wanted}");
    }
}
