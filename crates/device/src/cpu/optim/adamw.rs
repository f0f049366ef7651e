//! AdamW over blocks of elements: moments in whatever they are stored, widened, updated, and rounded again.
//!
//! It must not know tensors' names or schedules.

use super::super::Cpu;
use super::super::args::Kind::Exactly;
use super::super::args::Op;
use super::super::buffer::ViewMut;
use super::super::parallel::{TASK_ELEMENTS, vectorised};
use super::super::real::{Float, Rounding, SPLITMIX_STEP, splitmix64};
use crate::DType;
use crate::ops::moments::{BLOCK_ELEMENTS, RANDOM_BITS, SmallFloat};
use crate::ops::optim::{AdamW, Moment, RandomBits};
use rayon::prelude::*;

/// Bits of an element's random number above those of each rounding: the weight's come first.
const M_SHIFT: u32 = 16;
const V_SHIFT: u32 = M_SHIFT + RANDOM_BITS;

/// One moment of a parameter, as an op's closure holds it.
pub(super) enum Stored<R> {
    /// f32, or rounded to bf16.
    Floats(ViewMut<R>),
    /// Codes and scales.
    Codes(ViewMut<u8>, ViewMut<R>, SmallFloat),
}

impl<R: Float> Stored<R> {
    /// Checks shapes and dtypes.
    pub(super) fn new(op: &Op<'_>, names: [&'static str; 2], moment: Moment<'_, Cpu>, format: SmallFloat, len: usize) -> Self {
        let values = moment.values.reshape(&[moment.values.len()]);
        let is_codes = values.dtype() == DType::U8;
        op.require(is_codes == moment.scales.is_some(), || format!("{} is {values:?}: codes have scales", names[0]));
        let Some(scales) = moment.scales else {
            let kind = if values.dtype() == DType::Bf16 { DType::Bf16 } else { DType::F32 };
            return Self::Floats(op.write(names[0], &values, Exactly(kind), &[len]));
        };
        let codes = op.write(names[0], &values, Exactly(DType::U8), &[len]);
        let scales = op.write(names[1], scales, Exactly(DType::F32), &[len.div_ceil(BLOCK_ELEMENTS)]);
        Self::Codes(codes, scales, format)
    }

    /// By task.
    pub(super) fn slices(&mut self) -> Vec<Slice<'_, R>> {
        match self {
            Self::Floats(values) => {
                let rounding = values.rounding();
                values.slice().chunks_mut(TASK_ELEMENTS).map(|values| Slice::Floats(values, rounding)).collect()
            }
            Self::Codes(codes, scales, format) => {
                let scales = scales.slice().chunks_mut(TASK_ELEMENTS / BLOCK_ELEMENTS);
                let tasks = codes.slice().chunks_mut(TASK_ELEMENTS).zip(scales);
                tasks.map(|(codes, scales)| Slice::Codes(codes, scales, *format)).collect()
            }
        }
    }
}

/// A moment of one task's elements.
pub(super) enum Slice<'a, R> {
    Floats(&'a mut [R], Rounding),
    Codes(&'a mut [u8], &'a mut [R], SmallFloat),
}

impl<R: Float> Slice<'_, R> {
    /// Whether storing draws random bits.
    fn rounds(&self) -> bool {
        !matches!(self, Self::Floats(_, Rounding::None))
    }

    /// Widens block `index` into `out`.
    #[inline(always)]
    fn load(&self, index: usize, out: &mut [R]) {
        let start = index * BLOCK_ELEMENTS;
        match self {
            Self::Floats(values, _) => out.copy_from_slice(&values[start..start + out.len()]),
            Self::Codes(codes, scales, format) => {
                let (scale, codes) = (scales[index].to_f64() as f32, &codes[start..start + out.len()]);
                // Each with a format that is known when it is compiled: only then are they vector code.
                match format {
                    SmallFloat::Signed => decode(SmallFloat::Signed, out, codes, scale),
                    SmallFloat::Unsigned => decode(SmallFloat::Unsigned, out, codes, scale),
                }
            }
        }
    }

    /// Rounds block `index` from `values`, each by the bits of `random` after the first `shift`.
    #[inline(always)]
    fn store(&mut self, index: usize, values: &[R], random: &[u64], shift: u32) {
        let range = index * BLOCK_ELEMENTS..index * BLOCK_ELEMENTS + values.len();
        match self {
            Self::Floats(stored, Rounding::None) => stored[range].copy_from_slice(values),
            Self::Floats(stored, Rounding::Bf16) => {
                for ((stored, value), random) in stored[range].iter_mut().zip(values).zip(random) {
                    *stored = value.to_bf16_stochastic(random << shift);
                }
            }
            Self::Codes(codes, scales, format) => {
                // Magnitudes are in the order of their bits.
                let largest = values.iter().fold(0, |largest, x| largest.max((x.to_f64().abs() as f32).to_bits()));
                let scale = format.scale(f32::from_bits(largest));
                scales[index] = R::from_f32(scale);
                let codes = &mut codes[range];
                match format {
                    SmallFloat::Signed => encode(SmallFloat::Signed, codes, values, scale, random, shift),
                    SmallFloat::Unsigned => encode(SmallFloat::Unsigned, codes, values, scale, random, shift),
                }
            }
        }
    }
}

#[inline(always)]
fn decode<R: Float>(format: SmallFloat, out: &mut [R], codes: &[u8], scale: f32) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = R::from_f32(format.decode(code, scale));
    }
}

#[inline(always)]
fn encode<R: Float>(format: SmallFloat, codes: &mut [u8], values: &[R], scale: f32, random: &[u64], shift: u32) {
    for ((code, value), random) in codes.iter_mut().zip(values).zip(random) {
        *code = format.encode(value.to_f64() as f32, scale, (random << shift >> (64 - RANDOM_BITS)) as u32);
    }
}

/// Factor on the gradient, as [`crate::ops::optim::Clip`] defines it.
pub(super) fn clip_scale(norm_squared: f64, max_norm: f32) -> f64 {
    (f64::from(max_norm) / (norm_squared.sqrt() + 1e-6)).min(1.0)
}

/// The factors of one update, worked out once.
#[derive(Clone, Copy)]
pub(super) struct Update<R> {
    /// On the gradient: clipping.
    scale: R,
    /// `1 - lr · weight_decay`.
    shrink: R,
    beta1: R,
    /// `1 - beta1`.
    rest1: R,
    beta2: R,
    /// `1 - beta2`.
    rest2: R,
    /// `lr / (1 - beta1^step)`.
    step_size: R,
    /// `1 / sqrt(1 - beta2^step)`.
    root_factor: R,
    eps: R,
}

impl<R: Float> Update<R> {
    pub(super) fn new(hyper: AdamW, scale: f64) -> Self {
        let [lr, beta1, beta2, decay] = [hyper.lr, hyper.beta1, hyper.beta2, hyper.weight_decay].map(f64::from);
        let steps = f64::from(hyper.step);
        Self {
            scale: R::from_f64(scale),
            shrink: R::from_f64(1.0 - lr * decay),
            beta1: R::from_f64(beta1),
            rest1: R::from_f64(1.0 - beta1),
            beta2: R::from_f64(beta2),
            rest2: R::from_f64(1.0 - beta2),
            step_size: R::from_f64(lr / (1.0 - beta1.powf(steps))),
            root_factor: R::from_f64(1.0 / (1.0 - beta2.powf(steps)).sqrt()),
            eps: R::from_f32(hyper.eps),
        }
    }

    /// Decay, moments, step.
    #[inline(always)]
    fn step(&self, w: &mut [R], m: &mut [R], v: &mut [R], grad: &[R]) {
        for (((w, m), v), &grad) in w.iter_mut().zip(m).zip(v).zip(grad) {
            let grad = grad * self.scale;
            *m = self.beta1 * *m + self.rest1 * grad;
            *v = self.beta2 * *v + self.rest2 * grad * grad;
            *w = *w * self.shrink - self.step_size * *m / (v.sqrt() * self.root_factor + self.eps);
        }
    }
}

/// A parameter, and its master where there is one.
pub(super) struct Weights<'a, R> {
    pub(super) w: &'a mut [R],
    pub(super) master: Option<&'a mut [R]>,
    /// What storing does to `w`.
    pub(super) rounding: Rounding,
}

/// One update of a parameter, in parallel.
pub(super) fn apply<R: Float>(
    weights: Weights<'_, R>,
    m: Vec<Slice<'_, R>>,
    v: Vec<Slice<'_, R>>,
    grad: &[R],
    update: Update<R>,
    random: RandomBits,
) {
    let Weights { w, master, rounding } = weights;
    let masters: Vec<_> = match master {
        Some(master) => master.chunks_mut(TASK_ELEMENTS).map(Some).collect(),
        None => m.iter().map(|_| None).collect(),
    };
    let tasks = w.par_chunks_mut(TASK_ELEMENTS).zip(masters).zip(m).zip(v).zip(grad.par_chunks(TASK_ELEMENTS)).enumerate();
    tasks.for_each(|(task, ((((w, master), m), v), grad))| {
        let first = random.first + (task * TASK_ELEMENTS) as u64;
        let random = RandomBits { first, ..random };
        vectorised(
            #[inline(always)]
            || run(Weights { w, master, rounding }, m, v, grad, update, random),
        );
    });
}

/// The elements of one task, block by block.
#[inline(always)]
fn run<R: Float>(
    weights: Weights<'_, R>,
    mut m_stored: Slice<'_, R>,
    mut v_stored: Slice<'_, R>,
    grad: &[R],
    update: Update<R>,
    random: RandomBits,
) {
    let Weights { w, mut master, rounding } = weights;
    for (index, (w, grad)) in w.chunks_mut(BLOCK_ELEMENTS).zip(grad.chunks(BLOCK_ELEMENTS)).enumerate() {
        let (start, len) = (index * BLOCK_ELEMENTS, w.len());
        let (mut m, mut v) = ([R::ZERO; BLOCK_ELEMENTS], [R::ZERO; BLOCK_ELEMENTS]);
        let (m, v) = (&mut m[..len], &mut v[..len]);
        m_stored.load(index, m);
        v_stored.load(index, v);
        let element = random.first.wrapping_add(start as u64 + 1);
        let mut bits = [0u64; BLOCK_ELEMENTS];
        let bits = &mut bits[..len];
        if m_stored.rounds() || v_stored.rounds() || master.is_none() && rounding == Rounding::Bf16 {
            for (bits, element) in bits.iter_mut().zip(element..) {
                *bits = splitmix64(random.seed.wrapping_add(element.wrapping_mul(SPLITMIX_STEP)));
            }
        }
        match &mut master {
            Some(master) => {
                let master = &mut master[start..start + len];
                update.step(master, m, v, grad);
                w.copy_from_slice(master);
                rounding.apply(w);
            }
            None => {
                update.step(w, m, v, grad);
                if rounding == Rounding::Bf16 {
                    w.iter_mut().zip(&*bits).for_each(|(w, &random)| *w = w.to_bf16_stochastic(random));
                }
            }
        }
        m_stored.store(index, m, bits, M_SHIFT);
        v_stored.store(index, v, bits, V_SHIFT);
    }
}
