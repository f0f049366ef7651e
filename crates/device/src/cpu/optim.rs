//! [`OptimOps`] on the CPU.
//!
//! It must not know parameters' names or schedules of learning rates.

mod adamw;

use super::args::Kind::{Activation, Exactly, F32OrBf16, Float as AnyFloat};
use super::buffer::{View, ViewMut};
use super::parallel::{TASK_ELEMENTS, for_rows, sum, vectorised};
use super::real::{Float, Rounding, SPLITMIX_STEP, splitmix64};
use super::{Cpu, with_real};
use crate::ops::moments::SmallFloat;
use crate::ops::optim::{AdamW, AdamWState, Clip, OptimOps};
use crate::{DType, Tensor};
use adamw::{Stored, Update, Weights, clip_scale};
use rayon::prelude::*;

/// Runs a body with `$R` standing for the type in which `$tensor` is held.
macro_rules! with_held {
    ($device:expr, $tensor:expr, $R:ident, $body:block) => {
        if $tensor.dtype() == DType::F64 {
            type $R = f64;
            $body
        } else {
            with_real!($device, $R, $body)
        }
    };
}

impl OptimOps for Cpu {
    fn fill(&self, x: &mut Tensor<Self>, value: f32) {
        let op = self.op("fill");
        if x.dtype() == DType::U8 {
            let mut x = op.write::<u8>("x", x, Exactly(DType::U8), x.shape());
            return op.enqueue(move || x.slice().fill(value as u8));
        }
        with_held!(self, x, R, {
            let mut x = op.write::<R>("x", x, AnyFloat, x.shape());
            op.enqueue(move || {
                let mut value = [R::from_f32(value)];
                x.rounding().apply(&mut value);
                for_rows(x.slice(), 1, |_, x| x.fill(value[0]));
            });
        });
    }

    fn copy(&self, dst: &mut Tensor<Self>, src: &Tensor<Self>) {
        let op = self.op("copy");
        op.require(dst.len() == src.len(), || format!("dst is {dst:?}, src {src:?}, wanted as many elements"));
        with_held!(self, dst, D, {
            let dst = op.write::<D>("dst", dst, AnyFloat, dst.shape());
            with_held!(self, src, S, {
                let src = op.read::<S>("src", src, AnyFloat, src.shape());
                op.enqueue(move || convert(dst, &src));
            });
        });
    }

    fn fill_normal(&self, x: &mut Tensor<Self>, std: f32, seed: u64) {
        let op = self.op("fill_normal");
        with_held!(self, x, R, {
            let mut x = op.write::<R>("x", x, AnyFloat, x.shape());
            op.enqueue(move || {
                let rounding = x.rounding();
                for_rows(x.slice(), 1, |first, run| {
                    for (i, x) in run.iter_mut().enumerate() {
                        *x = R::from_f64(f64::from(std) * normal(seed, (first + i) as u64));
                    }
                    rounding.apply(run);
                });
            });
        });
    }

    fn sum_squares(&self, out: &mut Tensor<Self>, x: &Tensor<Self>) {
        let op = self.op("sum_squares");
        with_real!(self, R, {
            let mut out = op.write::<f64>("out", out, Exactly(DType::F64), &[1]);
            let x = op.read::<R>("x", x, F32OrBf16, x.shape());
            op.enqueue(move || out.slice()[0] += sum_squares(x.slice()));
        });
    }

    fn adamw(
        &self,
        w: &mut Tensor<Self>,
        state: AdamWState<'_, Self>,
        grad: &Tensor<Self>,
        hyper: AdamW,
        clip: Option<Clip<'_, Self>>,
    ) {
        let op = self.op("adamw");
        op.require(hyper.step > 0, || "steps count from 1".to_owned());
        let num = w.len();
        let len = [num];
        let flat = |x: &Tensor<Self>| x.reshape(&[x.len()]);
        with_real!(self, R, {
            let mut w = op.write::<R>("w", &flat(w), Activation, &len);
            let mut master = state.master.map(|master| op.write::<R>("master", &flat(master), Exactly(DType::F32), &len));
            let mut m = Stored::<R>::new(&op, ["m", "m's scales"], state.m, SmallFloat::Signed, num);
            let mut v = Stored::<R>::new(&op, ["v", "v's scales"], state.v, SmallFloat::Unsigned, num);
            let grad = op.read::<R>("grad", &flat(grad), Exactly(DType::F32), &len);
            let clip =
                clip.map(|clip| (op.read::<f64>("norm_squared", clip.norm_squared, Exactly(DType::F64), &[1]), clip.max_norm));
            op.enqueue(move || {
                let scale = clip.map_or(1.0, |(norm_squared, max_norm)| clip_scale(norm_squared.slice()[0], max_norm));
                let rounding = w.rounding();
                let weights = Weights { w: w.slice(), master: master.as_mut().map(ViewMut::slice), rounding };
                adamw::apply(weights, m.slices(), v.slices(), grad.slice(), Update::new(hyper, scale), state.random);
            });
        });
    }
}

fn convert<D: Float, S: Float>(mut dst: ViewMut<D>, src: &View<S>) {
    let rounding = dst.rounding();
    let src = src.slice();
    for_rows(
        dst.slice(),
        1,
        #[inline(always)]
        |first, dst| {
            for (dst, &src) in dst.iter_mut().zip(&src[first..]) {
                // Rounded in the source's type: through f32 an f64 would be rounded twice.
                let src = if rounding == Rounding::Bf16 { src.to_bf16() } else { src };
                *dst = D::from_f64(src.to_f64());
            }
        },
    );
}

/// Element `i` of the standard normal sequence of `seed`, as [`OptimOps::fill_normal`] defines it (Box-Muller).
fn normal(seed: u64, i: u64) -> f64 {
    const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
    let z = splitmix64(seed.wrapping_add((i + 1).wrapping_mul(SPLITMIX_STEP)));
    let u1 = ((z >> 40) + 1) as f64 * UNIT;
    let u2 = ((z >> 8) & 0xFF_FFFF) as f64 * UNIT;
    (-2.0 * u1.ln()).sqrt() * (std::f64::consts::TAU * u2).cos()
}

/// In runs of fixed length, whose sums are added in order.
fn sum_squares<R: Float>(x: &[R]) -> f64 {
    let run_sum = |run: &[R]| {
        vectorised(
            #[inline(always)]
            || {
                sum(
                    run,
                    #[inline(always)]
                    |x| x.to_f64() * x.to_f64(),
                )
            },
        )
    };
    let sums: Vec<f64> = x.par_chunks(TASK_ELEMENTS).map(run_sum).collect();
    sums.iter().sum()
}
