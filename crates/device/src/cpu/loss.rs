//! [`LossOps`] on the CPU.
//!
//! It must not know how tokens are tiled or how many count.

use super::args::Kind::{Activation, Exactly};
use super::parallel::{for_rows2, for_runs, largest, sum, task_rows};
use super::real::{Float, Rounding};
use super::{Cpu, with_real};
use crate::ops::loss::{IGNORE, LossOps};
use crate::{DType, Tensor};

impl LossOps for Cpu {
    fn cross_entropy_forward(&self, loss: &mut Tensor<Self>, logits: &Tensor<Self>, labels: &Tensor<Self>) {
        let op = self.op("cross_entropy_forward");
        op.require(logits.shape().len() == 2, || format!("logits are {logits:?}, wanted [t, V]"));
        let (t, v) = (logits.dim(0), logits.dim(1));
        with_real!(self, R, {
            let mut loss = op.write::<R>("loss", loss, Exactly(DType::F32), &[t]);
            let logits = op.read::<R>("logits", logits, Activation, &[t, v]);
            let labels = op.read::<u32>("labels", labels, Exactly(DType::U32), &[t]);
            op.enqueue(move || {
                check_labels(labels.slice(), v);
                forward(loss.slice(), logits.slice(), labels.slice(), v);
            });
        });
    }

    fn cross_entropy_backward(&self, loss: &mut Tensor<Self>, logits: &mut Tensor<Self>, labels: &Tensor<Self>, weight: f32) {
        let op = self.op("cross_entropy_backward");
        op.require(logits.shape().len() == 2, || format!("logits are {logits:?}, wanted [t, V]"));
        let (t, v) = (logits.dim(0), logits.dim(1));
        with_real!(self, R, {
            let mut loss = op.write::<R>("loss", loss, Exactly(DType::F32), &[t]);
            let mut logits = op.write::<R>("logits", logits, Activation, &[t, v]);
            let labels = op.read::<u32>("labels", labels, Exactly(DType::U32), &[t]);
            op.enqueue(move || {
                check_labels(labels.slice(), v);
                let rounding = logits.rounding();
                let logits = Logits { rows: logits.slice(), v, rounding };
                backward(loss.slice(), logits, labels.slice(), R::from_f32(weight));
            });
        });
    }
}

fn check_labels(labels: &[u32], vocabulary: usize) {
    if let Some(t) = labels.iter().position(|&label| label != IGNORE && label as usize >= vocabulary) {
        panic!("token {t} has label {}, outside the vocabulary of {vocabulary}", labels[t]);
    }
}

fn forward<R: Float>(loss: &mut [R], logits: &[R], labels: &[u32], v: usize) {
    for_runs(
        loss,
        1,
        task_rows(v),
        #[inline(always)]
        |first, loss| {
            let rows = logits[first * v..].chunks_exact(v).zip(&labels[first..]);
            for (loss, (logits, &label)) in loss.iter_mut().zip(rows) {
                *loss = R::ZERO;
                if label != IGNORE {
                    let max = largest(logits);
                    let total: R = sum(
                        logits,
                        #[inline(always)]
                        |x| (x - max).exp(),
                    );
                    *loss = total.ln() + (max - logits[label as usize]);
                }
            }
        },
    );
}

/// `[t, V]` logits that become their gradient.
struct Logits<'a, R> {
    rows: &'a mut [R],
    v: usize,
    rounding: Rounding,
}

fn backward<R: Float>(loss: &mut [R], logits: Logits<'_, R>, labels: &[u32], weight: R) {
    let Logits { rows, v, rounding } = logits;
    for_rows2(
        (rows, v),
        (loss, 1),
        #[inline(always)]
        |first, rows, loss| {
            for ((row, loss), &label) in rows.chunks_exact_mut(v).zip(loss).zip(&labels[first..]) {
                *loss = R::ZERO;
                if label == IGNORE {
                    row.fill(R::ZERO);
                } else {
                    *loss = row_gradient(row, label as usize, weight);
                    rounding.apply(row);
                }
            }
        },
    );
}

/// Overwrites one row of logits by its gradient; returns its loss.
#[inline(always)]
fn row_gradient<R: Float>(row: &mut [R], label: usize, weight: R) -> R {
    let max = largest(row);
    let distance = max - row[label];
    for x in &mut *row {
        *x = (*x - max).exp();
    }
    let total: R = sum(
        row,
        #[inline(always)]
        |x| x,
    );
    let factor = weight / total;
    for x in &mut *row {
        *x *= factor;
    }
    row[label] -= weight;
    total.ln() + distance
}
