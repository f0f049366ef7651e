//! [`MlpOps`] on the CPU.
//!
//! It must not know the projections around it.

use super::args::Kind::Activation;
use super::parallel::for_rows;
use super::real::{Float, Rounding};
use super::{Cpu, with_real};
use crate::Tensor;
use crate::ops::mlp::MlpOps;

impl MlpOps for Cpu {
    fn swiglu_forward(&self, y: &mut Tensor<Self>, gate_up: &Tensor<Self>) {
        let op = self.op("swiglu_forward");
        op.require(y.shape().len() == 2, || format!("y is {y:?}, wanted [T, F]"));
        let (t, f) = (y.dim(0), y.dim(1));
        with_real!(self, R, {
            let mut y = op.write::<R>("y", y, Activation, &[t, f]);
            let gate_up = op.read::<R>("gate_up", gate_up, Activation, &[t, 2 * f]);
            op.enqueue(move || {
                let rounding = y.rounding();
                forward(y.slice(), gate_up.slice(), f, rounding);
            });
        });
    }

    fn swiglu_backward(&self, gate_up: &mut Tensor<Self>, dy: &mut Tensor<Self>) {
        let op = self.op("swiglu_backward");
        op.require(dy.shape().len() == 2, || format!("dy is {dy:?}, wanted [T, F]"));
        let (t, f) = (dy.dim(0), dy.dim(1));
        with_real!(self, R, {
            let mut gate_up = op.write::<R>("gate_up", gate_up, Activation, &[t, 2 * f]);
            let mut dy = op.write::<R>("dy", dy, Activation, &[t, f]);
            op.enqueue(move || {
                let rounding = gate_up.rounding();
                let mut y = vec![R::ZERO; t * f];
                forward(&mut y, gate_up.slice(), f, rounding);
                backward(gate_up.slice(), dy.slice(), f, rounding);
                dy.slice().copy_from_slice(&y);
            });
        });
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
fn sigmoid<R: Float>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

fn forward<R: Float>(y: &mut [R], gate_up: &[R], f: usize, rounding: Rounding) {
    for_rows(
        y,
        f,
        #[inline(always)]
        |first, y| {
            for (y, gate_up) in y.chunks_exact_mut(f).zip(gate_up[first * 2 * f..].chunks_exact(2 * f)) {
                let (gate, up) = gate_up.split_at(f);
                for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                    *y = gate * sigmoid(gate) * up;
                }
                rounding.apply(y);
            }
        },
    );
}

/// `silu'(g) = σ(g) · (1 + g · (1 - σ(g)))`.
fn backward<R: Float>(gate_up: &mut [R], dy: &[R], f: usize, rounding: Rounding) {
    for_rows(
        gate_up,
        2 * f,
        #[inline(always)]
        |first, gate_up| {
            for (gate_up, dy) in gate_up.chunks_exact_mut(2 * f).zip(dy[first * f..].chunks_exact(f)) {
                let (gates, ups) = gate_up.split_at_mut(f);
                for ((gate, up), &dy) in gates.iter_mut().zip(ups).zip(dy) {
                    let sigma = sigmoid(*gate);
                    let silu = *gate * sigma;
                    *gate = dy * *up * sigma * (R::ONE + *gate * (R::ONE - sigma));
                    *up = dy * silu;
                }
                rounding.apply(gate_up);
            }
        },
    );
}
