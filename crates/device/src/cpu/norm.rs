//! [`NormOps`] on the CPU.
//!
//! It must not know what is normed.

use super::args::Kind::{Activation, Exactly};
use super::buffer::ViewMut;
use super::parallel::{for_rows_summing, for_rows2, sum, sum3};
use super::real::{Float, Rounding};
use super::{Cpu, with_real};
use crate::ops::norm::NormOps;
use crate::{DType, Tensor};

impl NormOps for Cpu {
    fn rmsnorm_forward(&self, y: &mut Tensor<Self>, rstd: &mut Tensor<Self>, x: &Tensor<Self>, weight: &Tensor<Self>, eps: f32) {
        let op = self.op("rmsnorm_forward");
        op.require(x.shape().len() == 2, || format!("x is {x:?}, wanted [T, D]"));
        let (t, d) = (x.dim(0), x.dim(1));
        with_real!(self, R, {
            let mut y = op.write::<R>("y", y, Activation, &[t, d]);
            let mut rstd = op.write::<R>("rstd", rstd, Exactly(DType::F32), &[t]);
            let x = op.read::<R>("x", x, Activation, &[t, d]);
            let weight = op.read::<R>("weight", weight, Activation, &[d]);
            op.enqueue(move || {
                let rounding = y.rounding();
                forward(y.slice(), rstd.slice(), x.slice(), weight.slice(), R::from_f32(eps), rounding);
            });
        });
    }

    fn rmsnorm_backward(
        &self,
        dx: &mut Tensor<Self>,
        dweight: Option<&mut Tensor<Self>>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        rstd: &Tensor<Self>,
        weight: &Tensor<Self>,
    ) {
        let op = self.op("rmsnorm_backward");
        op.require(x.shape().len() == 2, || format!("x is {x:?}, wanted [T, D]"));
        let (t, d) = (x.dim(0), x.dim(1));
        with_real!(self, R, {
            let mut dx = op.write::<R>("dx", dx, Activation, &[t, d]);
            let mut dweight = dweight.map(|dweight| op.write::<R>("dweight", dweight, Exactly(DType::F32), &[d]));
            let dy = op.read::<R>("dy", dy, Activation, &[t, d]);
            let x = op.read::<R>("x", x, Activation, &[t, d]);
            let rstd = op.read::<R>("rstd", rstd, Exactly(DType::F32), &[t]);
            let weight = op.read::<R>("weight", weight, Activation, &[d]);
            op.enqueue(move || {
                let rounding = dx.rounding();
                let saved = Saved { x: x.slice(), rstd: rstd.slice(), weight: weight.slice() };
                // Summed in any case; without a gradient the sum is dropped.
                let mut frozen = vec![R::ZERO; if dweight.is_some() { 0 } else { d }];
                let dweight = dweight.as_mut().map_or(frozen.as_mut_slice(), ViewMut::slice);
                backward(dx.slice(), dweight, dy.slice(), saved, rounding);
            });
        });
    }
}

fn forward<R: Float>(y: &mut [R], rstd: &mut [R], x: &[R], weight: &[R], eps: R, rounding: Rounding) {
    let d = weight.len();
    for_rows2(
        (y, d),
        (rstd, 1),
        #[inline(always)]
        |first, y, rstd| {
            let rows = y.chunks_exact_mut(d).zip(x[first * d..].chunks_exact(d));
            for ((y, x), rstd) in rows.zip(rstd) {
                *rstd = inverse_rms(x, eps);
                for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                    *y = x * *rstd * w;
                }
                rounding.apply(y);
            }
        },
    );
}

/// What the forward pass read and left.
struct Saved<'a, R> {
    x: &'a [R],
    rstd: &'a [R],
    weight: &'a [R],
}

fn backward<R: Float>(dx: &mut [R], dweight: &mut [R], dy: &[R], saved: Saved<'_, R>, rounding: Rounding) {
    let d = saved.weight.len();
    for_rows_summing(
        dx,
        d,
        dweight,
        #[inline(always)]
        |first, dx, dweight| {
            let rows = dx.chunks_exact_mut(d).zip(dy[first * d..].chunks_exact(d)).zip(saved.x[first * d..].chunks_exact(d));
            for (((dx, dy), x), &rstd) in rows.zip(&saved.rstd[first..]) {
                add_gradient(dx, dweight, dy, x, rstd, saved.weight);
                rounding.apply(dx);
            }
        },
    );
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(super) fn inverse_rms<R: Float>(x: &[R], eps: R) -> R {
    let sum_squares: R = sum(
        x,
        #[inline(always)]
        |x| x * x,
    );
    R::ONE / (sum_squares / R::from_f64(x.len() as f64) + eps).sqrt()
}

/// One row: `dx += rstd · (g - x · rstd² · mean(g · x))` with `g = dy · weight`, and `dweight += dy · x · rstd`.
#[inline(always)]
pub(super) fn add_gradient<R: Float>(dx: &mut [R], dweight: &mut [R], dy: &[R], x: &[R], rstd: R, weight: &[R]) {
    let d = weight.len();
    let (dx, dweight, dy, x) = (&mut dx[..d], &mut dweight[..d], &dy[..d], &x[..d]);
    let product: R = sum3(
        dy,
        weight,
        x,
        #[inline(always)]
        |dy, weight, x| dy * weight * x,
    );
    let pull = rstd * rstd * product / R::from_f64(d as f64);
    for i in 0..d {
        dx[i] += rstd * (dy[i] * weight[i] - x[i] * pull);
        dweight[i] += dy[i] * x[i] * rstd;
    }
}
