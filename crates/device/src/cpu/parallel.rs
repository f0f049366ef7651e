//! Parallel loops over rows, vector code, and sums whose order does not depend on the machine.
//!
//! It must not know tensors. Partitions are fixed by the sizes alone, so that the number of threads never changes a bit.

use super::real::Float;
use rayon::prelude::*;

/// Elements that one task handles: about 64 KiB of f32, so that a task outweighs its scheduling by far.
pub(super) const TASK_ELEMENTS: usize = 16 * 1024;

/// Lanes of a sum; one AVX-512 register of f32.
const LANES: usize = 16;

/// Rows of `width` elements that one task handles.
pub(super) fn task_rows(width: usize) -> usize {
    (TASK_ELEMENTS / width.max(1)).max(1)
}

/// Calls `body(first row, rows)` for runs of whole rows of `data`, in parallel.
pub(super) fn for_rows<T: Send>(data: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    for_runs(data, width, task_rows(width), body);
}

/// The same with `rows` rows in a run: where the work of a row is not its width.
pub(super) fn for_runs<T: Send>(data: &mut [T], width: usize, rows: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let task = |(index, run): (usize, &mut [T])| {
        vectorised(
            #[inline(always)]
            || body(index * rows, run),
        );
    };
    // One task is not worth waking anyone, here and below.
    if data.len() <= rows * width {
        task((0, data));
    } else {
        data.par_chunks_mut(rows * width).enumerate().for_each(task);
    }
}

/// Calls `body(first row, rows of a, rows of b)` for runs of rows of two arrays, in parallel.
pub(super) fn for_rows2<T: Send>(
    (a, width_a): (&mut [T], usize),
    (b, width_b): (&mut [T], usize),
    body: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) {
    let rows = task_rows(width_a.max(width_b));
    let task = |(index, (a, b)): (usize, (&mut [T], &mut [T]))| {
        vectorised(
            #[inline(always)]
            || body(index * rows, a, b),
        );
    };
    if a.len() <= rows * width_a {
        task((0, (a, b)));
    } else {
        a.par_chunks_mut(rows * width_a).zip(b.par_chunks_mut(rows * width_b)).enumerate().for_each(task);
    }
}

/// Calls `body(first row, rows, partial)` for runs of rows, in parallel, and adds the partial sums to `total` in the
/// order of the runs. Each partial starts from zero.
pub(super) fn for_rows_summing<R: Float>(
    data: &mut [R],
    width: usize,
    total: &mut [R],
    body: impl Fn(usize, &mut [R], &mut [R]) + Sync,
) {
    let (rows, sums) = (task_rows(width), total.len());
    let task = |(index, run): (usize, &mut [R])| {
        let mut partial = vec![R::ZERO; sums];
        vectorised(
            #[inline(always)]
            || body(index * rows, run, &mut partial),
        );
        partial
    };
    let runs = data.par_chunks_mut(rows * width).enumerate();
    let partials: Vec<Vec<R>> = if runs.len() == 1 { vec![task((0, data))] } else { runs.map(task).collect() };
    add_in_order(total, &partials);
}

/// Adds every row of `data` to `total`, in runs whose partial sums are added in order.
pub(super) fn add_rows<R: Float>(total: &mut [R], data: &[R]) {
    let width = total.len();
    let task = |run: &[R]| {
        let mut partial = vec![R::ZERO; width];
        vectorised(
            #[inline(always)]
            || run.chunks_exact(width).for_each(|row| add(&mut partial, row)),
        );
        partial
    };
    let runs = data.par_chunks(task_rows(width) * width);
    let partials: Vec<Vec<R>> = if runs.len() == 1 { vec![task(data)] } else { runs.map(task).collect() };
    add_in_order(total, &partials);
}

fn add_in_order<R: Float>(total: &mut [R], partials: &[Vec<R>]) {
    partials.iter().for_each(|partial| add(total, partial));
}

/// `total += term`, element by element.
#[inline(always)]
pub(super) fn add<R: Float>(total: &mut [R], term: &[R]) {
    for (total, &term) in total.iter_mut().zip(term) {
        *total += term;
    }
}

/// Runs `f`, compiled for the widest vectors that this machine has. What `f` calls takes part only where it is inlined.
#[inline(always)]
pub(super) fn vectorised<T>(f: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2")]
        fn with_avx512<T>(f: impl FnOnce() -> T) -> T {
            f()
        }
        #[target_feature(enable = "avx2,bmi2")]
        fn with_avx2<T>(f: impl FnOnce() -> T) -> T {
            f()
        }
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: every processor with these has avx2 and bmi2.
            return unsafe { with_avx512(f) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") {
            // SAFETY: just detected.
            return unsafe { with_avx2(f) };
        }
    }
    f()
}

/// `Σ f(a, b, c)` over three rows in a fixed order that vectorises; the sum has the type of the terms.
#[inline(always)]
pub(super) fn sum3<R: Float, S: Float>(a: &[R], b: &[R], c: &[R], f: impl Fn(R, R, R) -> S) -> S {
    let mut lanes = [S::ZERO; LANES];
    let (a, b, c) = (a.chunks_exact(LANES), b.chunks_exact(LANES), c.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder()).zip(c.remainder());
    let rest = rest.map(|((&a, &b), &c)| f(a, b, c)).sum();
    for ((a, b), c) in a.zip(b).zip(c) {
        for lane in 0..LANES {
            lanes[lane] += f(a[lane], b[lane], c[lane]);
        }
    }
    fold(lanes, rest, |x, y| x + y)
}

/// `Σ f(a)` over a row in a fixed order that vectorises.
#[inline(always)]
pub(super) fn sum<R: Float, S: Float>(a: &[R], f: impl Fn(R) -> S) -> S {
    sum3(
        a,
        a,
        a,
        #[inline(always)]
        |x, _, _| f(x),
    )
}

/// The largest element; minus infinity of none.
#[inline(always)]
pub(super) fn largest<R: Float>(a: &[R]) -> R {
    let mut lanes = [R::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(R::NEG_INFINITY, |x, &y| x.max(y));
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane].max(x[lane]);
        }
    }
    fold(lanes, rest, R::max)
}

/// Pairwise, so that the compiler may keep halving a register.
#[inline(always)]
fn fold<R: Float>(mut lanes: [R; LANES], rest: R, f: impl Fn(R, R) -> R) -> R {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = f(lanes[lane], lanes[lane + width]);
        }
    }
    f(lanes[0], rest)
}

#[cfg(test)]
mod tests {
    use super::super::product::{Mat, MatMut, Threads, gemm};
    use super::*;

    /// Runs `f` with as many threads.
    fn with_threads<T: Send>(num_threads: usize, f: impl FnOnce() -> T + Send) -> T {
        rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap().install(f)
    }

    fn wave(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.7).sin()).collect()
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let results = [1, 2, 3, 7].map(|num_threads| {
            with_threads(num_threads, || {
                let mut columns = vec![0.5f32; 300];
                add_rows(&mut columns, &wave(300 * 1001));
                let (mut rows, mut total) = (wave(300 * 1001), vec![0.25f32; 300]);
                for_rows_summing(&mut rows, 300, &mut total, |first, rows, partial| {
                    for row in rows.chunks_exact_mut(300) {
                        row[0] += first as f32;
                        add(partial, row);
                    }
                });
                let (a, b, mut c) = (wave(301 * 999), wave(999 * 257), wave(301 * 257));
                let product = (Mat::new(&a, 999, 301).t(), Mat::new(&b, 257, 999).t());
                gemm(MatMut::new(&mut c, 301, 257), 1.0, 1.0, product.0, product.1, Threads::All);
                (columns, rows, total, c)
            })
        });
        assert!(results.iter().all(|result| *result == results[0]));
    }

    #[test]
    fn sums_and_maxima_take_every_element() {
        for len in [0, 1, 15, 16, 17, 100] {
            let x: Vec<f64> = (0..len).map(|i| f64::from((i * 7) % 101)).collect();
            assert_eq!(sum::<f64, f64>(&x, |x| x), x.iter().sum::<f64>());
            assert_eq!(sum3::<f64, f64>(&x, &x, &x, |a, b, c| a * b * c), x.iter().map(|x| x.powi(3)).sum::<f64>());
            assert_eq!(largest(&x), x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
