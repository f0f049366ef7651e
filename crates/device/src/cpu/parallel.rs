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
    let rows = task_rows(width);
    let task = |(index, run): (usize, &mut [T])| {
        vectorised(
            #[inline(always)]
            || body(index * rows, run),
        )
    };
    if data.len() <= rows * width {
        // One task: not worth waking anyone.
        if !data.is_empty() {
            task((0, data));
        }
    } else {
        data.par_chunks_mut(rows * width).enumerate().for_each(task);
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

/// `Σ f(a, b)` over two rows in a fixed order that vectorises.
#[inline(always)]
pub(super) fn sum2<R: Float>(a: &[R], b: &[R], f: impl Fn(R, R) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (chunks_a, chunks_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut rest = R::ZERO;
    for (&x, &y) in chunks_a.remainder().iter().zip(chunks_b.remainder()) {
        rest += f(x, y);
    }
    for (x, y) in chunks_a.zip(chunks_b) {
        for lane in 0..LANES {
            lanes[lane] += f(x[lane], y[lane]);
        }
    }
    fold(lanes, rest, |x, y| x + y)
}

/// `Σ f(a)` over a row in a fixed order that vectorises.
#[inline(always)]
pub(super) fn sum<R: Float>(a: &[R], f: impl Fn(R) -> R) -> R {
    sum2(
        a,
        a,
        #[inline(always)]
        |x, _| f(x),
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
