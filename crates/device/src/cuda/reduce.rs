//! Two-step sums in a fixed order: partial sums of fixed runs of rows in scratch, then those added one after the other.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch};

pub(super) static UNIT: Unit =
    Unit { stem: "reduce", source: include_str!("../../kernels/reduce.cu"), variants: &[&[]], only: None };

/// Most runs that rows are divided into.
const MAX_PARTS: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnPartialParams {
    partial: u64,
    x: u64,
    num_rows: i64,
    n: i32,
    rows_per_part: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddPartialParams {
    out: u64,
    partial: u64,
    n: i32,
    num_parts: i32,
    stride: i32,
}

/// A division of rows that depends on their number alone: (runs, rows in each).
pub(super) fn parts(rows: usize) -> (usize, usize) {
    let per_part = rows.div_ceil(MAX_PARTS).max(1);
    (rows.div_ceil(per_part), per_part)
}

impl Cuda {
    /// Scratch for `parts` rows of `n` f32.
    pub(super) fn partial(&self, parts: usize, n: usize) -> u64 {
        let (address, bytes) = self.scratch();
        let wanted = (parts * n * 4) as u64;
        assert!(wanted <= bytes, "a sum of {parts} x {n} needs {wanted} bytes of scratch, there are {bytes}");
        address
    }

    /// `out[n] += Σ partial[parts, n]`, in order.
    pub(super) fn add_partial(&self, op: &'static str, out: u64, partial: u64, parts: usize, n: usize) {
        self.add_partial_strided(op, out, partial, (parts, n, n));
    }

    /// The same where a row of `partial` is `stride` wide and only its first `n` count: (parts, stride, n).
    pub(super) fn add_partial_strided(
        &self,
        op: &'static str,
        out: u64,
        partial: u64,
        (parts, stride, n): (usize, usize, usize),
    ) {
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "add_partial" };
        let params = AddPartialParams { out, partial, n: int(n), num_parts: int(parts), stride: int(stride) };
        self.launch(op, &kernel, Launch::linear(n.div_ceil(256) as u64, 256), &params);
    }

    /// `out[n] += Σ_t x[t, n]` of a bf16 matrix.
    pub(super) fn add_columns(&self, op: &'static str, out: u64, x: u64, rows: usize, n: usize) {
        let (parts, per_part) = parts(rows);
        let partial = self.partial(parts, n);
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "column_partial" };
        let params = ColumnPartialParams { partial, x, num_rows: rows as i64, n: int(n), rows_per_part: int(per_part) };
        let blocks = [parts as u32, n.div_ceil(256) as u32, 1];
        self.launch(op, &kernel, Launch { blocks, threads: 256, shared_bytes: 0 }, &params);
        self.add_partial(op, out, partial, parts, n);
    }
}
