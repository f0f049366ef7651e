//! [`LinearOps`] on the CPU: products by the `gemm` crate.
//!
//! It must not know which layer it computes.

use super::args::Kind::{Activation, Exactly};
use super::args::{Op, same_bytes};
use super::buffer::{View, ViewMut};
use super::parallel::{add_rows, for_rows};
use super::product::{Mat, MatMut, Threads, gemm};
use super::real::{Float, Rounding};
use super::{Cpu, with_real};
use crate::ops::linear::{Columns, Epilogue, LinearOps, Write};
use crate::{DType, Tensor};

impl LinearOps for Cpu {
    fn linear_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, epilogue: Epilogue<'_, Self>) {
        let op = self.op("linear_forward");
        op.require(x.shape().len() == 2 && w.shape().len() == 2, || format!("x is {x:?}, w {w:?}, wanted [T, K] and [N, K]"));
        let (t, n, k) = (x.dim(0), w.dim(0), x.dim(1));
        with_real!(self, R, {
            let start = match epilogue {
                Epilogue::None => Start::Nothing,
                Epilogue::Bias(bias) => Start::Bias(op.read::<R>("bias", bias, Activation, &[n])),
                Epilogue::Residual(residual) if same_bytes(residual, y) => Start::Itself,
                Epilogue::Residual(residual) => Start::Matrix(op.read::<R>("residual", residual, Activation, &[t, n])),
            };
            let mut y = op.write::<R>("y", y, Activation, &[t, n]);
            let x = op.read::<R>("x", x, Activation, &[t, k]);
            let w = op.read::<R>("w", w, Activation, &[n, k]);
            op.enqueue(move || {
                let keep = start.prepare(y.slice());
                let product = (Mat::new(x.slice(), t, k), Mat::new(w.slice(), n, k).t());
                multiply(&mut y, (t, n), keep, product);
            });
        });
    }

    fn linear_backward_input(&self, dx: &mut Tensor<Self>, dy: &Tensor<Self>, w: &Tensor<Self>, write: Write) {
        let op = self.op("linear_backward_input");
        op.require(dy.shape().len() == 2 && w.shape().len() == 2, || format!("dy is {dy:?}, w {w:?}, wanted [T, N] and [N, K]"));
        let (t, n, k) = (dy.dim(0), w.dim(0), w.dim(1));
        with_real!(self, R, {
            let mut dx = op.write::<R>("dx", dx, Activation, &[t, k]);
            let dy = op.read::<R>("dy", dy, Activation, &[t, n]);
            let w = op.read::<R>("w", w, Activation, &[n, k]);
            op.enqueue(move || {
                let product = (Mat::new(dy.slice(), t, n), Mat::new(w.slice(), n, k));
                multiply(&mut dx, (t, k), keep_of(write), product);
            });
        });
    }

    fn linear_backward_weight(&self, dw: &mut Tensor<Self>, dy: &Tensor<Self>, x: &Tensor<Self>, write: Write) {
        let op = self.op("linear_backward_weight");
        op.require(dy.shape().len() == 2 && x.shape().len() == 2, || format!("dy is {dy:?}, x {x:?}, wanted [T, N] and [T, K]"));
        let (t, n, k) = (dy.dim(0), dy.dim(1), x.dim(1));
        with_real!(self, R, {
            let mut dw = op.write::<R>("dw", dw, Exactly(DType::F32), &[n, k]);
            let dy = op.read::<R>("dy", dy, Activation, &[t, n]);
            let x = op.read::<R>("x", x, Activation, &[t, k]);
            op.enqueue(move || {
                let product = (Mat::new(dy.slice(), t, n).t(), Mat::new(x.slice(), t, k));
                multiply(&mut dw, (n, k), keep_of(write), product);
            });
        });
    }

    fn linear_backward_bias(&self, dbias: &mut Tensor<Self>, dy: &Tensor<Self>) {
        let op = self.op("linear_backward_bias");
        op.require(dy.shape().len() == 2, || format!("dy is {dy:?}, wanted [T, N]"));
        let (t, n) = (dy.dim(0), dy.dim(1));
        with_real!(self, R, {
            let mut dbias = op.write::<R>("dbias", dbias, Exactly(DType::F32), &[n]);
            let dy = op.read::<R>("dy", dy, Activation, &[t, n]);
            op.enqueue(move || add_rows(dbias.slice(), dy.slice()));
        });
    }

    fn linear_columns_forward(&self, y: &mut Tensor<Self>, x: &Tensor<Self>, w: &Tensor<Self>, columns: &Columns) {
        let op = self.op("linear_columns_forward");
        let (t, k, n) = (x.dim(0), x.dim(1), check_columns(&op, "y", y, columns));
        let Columns { range, scale } = columns.clone();
        with_real!(self, R, {
            let mut y = op.write::<R>("y", y, Activation, &[t, n]);
            let x = op.read::<R>("x", x, Activation, &[t, k]);
            let w = op.read::<R>("w", w, Activation, &[range.len(), k]);
            op.enqueue(move || {
                let (rounding, rows) = (y.rounding(), y.slice());
                let product = (Mat::new(x.slice(), t, k), Mat::new(w.slice(), range.len(), k).t());
                let dst = MatMut::strided(&mut rows[range.start..], t, range.len(), n);
                gemm(dst, R::ONE, R::from_f32(scale), product.0, product.1, Threads::All);
                for_rows(rows, n, |_, rows| rows.chunks_exact_mut(n).for_each(|row| rounding.apply(&mut row[range.clone()])));
            });
        });
    }

    fn linear_columns_backward(
        &self,
        dx: &mut Tensor<Self>,
        dw: &mut Tensor<Self>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        w: &Tensor<Self>,
        columns: &Columns,
    ) {
        let op = self.op("linear_columns_backward");
        let (t, k, n) = (x.dim(0), x.dim(1), check_columns(&op, "dy", dy, columns));
        let Columns { range, scale } = columns.clone();
        with_real!(self, R, {
            let mut dx = op.write::<R>("dx", dx, Activation, &[t, k]);
            let mut dw = op.write::<R>("dw", dw, Exactly(DType::F32), &[range.len(), k]);
            let dy = op.read::<R>("dy", dy, Activation, &[t, n]);
            let x = op.read::<R>("x", x, Activation, &[t, k]);
            let w = op.read::<R>("w", w, Activation, &[range.len(), k]);
            op.enqueue(move || {
                let (rounding, scale) = (dx.rounding(), R::from_f32(scale));
                let dy = Mat::strided(&dy.slice()[range.start..], t, range.len(), n);
                let (x, w) = (Mat::new(x.slice(), t, k), Mat::new(w.slice(), range.len(), k));
                gemm(MatMut::new(dw.slice(), range.len(), k), R::ONE, scale, dy.t(), x, Threads::All);
                gemm(MatMut::new(dx.slice(), t, k), R::ZERO, scale, dy, w, Threads::All);
                rounding.apply(dx.slice());
            });
        });
    }
}

/// The width of a matrix whose columns are meant.
fn check_columns(op: &Op<'_>, argument: &str, tensor: &Tensor<Cpu>, columns: &Columns) -> usize {
    let width = if tensor.shape().len() == 2 { tensor.dim(1) } else { 0 };
    op.require(columns.range.start < columns.range.end && columns.range.end <= width, || {
        format!("{argument} is {tensor:?}, wanted [T, N] with columns {:?}", columns.range)
    });
    width
}

/// What the product is added to.
enum Start<R> {
    Nothing,
    Itself,
    Bias(View<R>),
    Matrix(View<R>),
}

impl<R: Float> Start<R> {
    /// Puts it into `y`; returns the factor by which `y` is kept.
    fn prepare(&self, y: &mut [R]) -> R {
        match self {
            Self::Nothing => return R::ZERO,
            Self::Itself => {}
            Self::Bias(bias) => {
                let n = bias.len();
                for_rows(y, n, |_, y| y.chunks_exact_mut(n).for_each(|y| y.copy_from_slice(bias.slice())));
            }
            Self::Matrix(matrix) => y.copy_from_slice(matrix.slice()),
        }
        R::ONE
    }
}

/// The factor of what the output holds.
fn keep_of<R: Float>(write: Write) -> R {
    match write {
        Write::Overwrite => R::ZERO,
        Write::Accumulate => R::ONE,
    }
}

/// `dst = keep · dst + a b`, rounded once.
fn multiply<R: Float>(dst: &mut ViewMut<R>, (rows, cols): (usize, usize), keep: R, (a, b): (Mat<'_, R>, Mat<'_, R>)) {
    gemm(MatMut::new(dst.slice(), rows, cols), keep, R::ONE, a, b, Threads::All);
    let rounding = dst.rounding();
    if rounding != Rounding::None {
        for_rows(
            dst.slice(),
            cols,
            #[inline(always)]
            |_, rows| rounding.apply(rows),
        );
    }
}
