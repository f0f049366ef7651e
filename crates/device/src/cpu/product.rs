//! Matrix products over strided slices.
//!
//! It must not know tensors or what the matrices mean.

use super::real::Float;

/// A matrix in a slice; element (i, j) is at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Rows one after another.
    pub(super) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `row_stride` elements apart.
    pub(super) fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose of the same elements.
    pub(super) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// A matrix to be written, rows `row_stride` elements apart.
pub(super) struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T> MatMut<'a, T> {
    /// Rows one after another.
    pub(super) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows `row_stride` elements apart.
    pub(super) fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self { data, rows, cols, row_stride }
    }
}

fn check(len: usize, rows: usize, cols: usize, row_stride: usize) {
    let end = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
    assert!(row_stride >= cols && end <= len, "a {rows} x {cols} matrix with rows {row_stride} apart in {len} elements");
}

/// How many threads share one product. Sums run over k in the same order either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Threads {
    /// The caller alone: products inside a parallel loop.
    One,
    /// All of rayon's.
    All,
}

/// `dst = keep · dst + scale · a b`; where `keep` is 0, the old content is not read.
pub(super) fn gemm<R: Float>(dst: MatMut<'_, R>, keep: R, scale: R, a: Mat<'_, R>, b: Mat<'_, R>, threads: Threads) {
    assert!(
        dst.rows == a.rows && dst.cols == b.cols && a.cols == b.rows,
        "product {} x {} of {} x {} and {} x {}",
        dst.rows,
        dst.cols,
        a.rows,
        a.cols,
        b.rows,
        b.cols
    );
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: the three matrices lie inside their slices (checked when made, transposing moves nothing), `dst` is borrowed
    // mutably and so overlaps neither, and the sizes agree.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            dst.data.as_mut_ptr(),
            1,
            dst.row_stride as isize,
            keep != R::ZERO,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
