//! How fast a machine is at what a training step is made of (products, attention, copies) and at whole steps, beside
//! ceilings measured once. It must not know terminals, nor which backend it measures.

pub mod attention;
mod ceiling;
pub mod copy;
pub mod gemm;
pub mod rates;
mod report;
pub mod step;

pub use ceiling::Ceilings;
pub use report::{Report, Row, Work, aligned};

use oomb_device::device::new_tensor;
use oomb_device::{Backend, DType, Result, Tensor};
use std::time::{Duration, Instant};

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// Samples, of which the median counts.
    pub samples: usize,
    /// Least duration of one sample: as many calls as it takes are enqueued between two waits, so that the wait (some 20
    /// microseconds on a GPU) and the first launch are lost in it.
    pub sample: Duration,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { samples: 5, sample: Duration::from_millis(100) }
    }
}

/// Seconds of one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Of all samples.
    pub median: f64,
    /// The fastest sample.
    pub min: f64,
    /// The slowest sample.
    pub max: f64,
}

impl Timing {
    /// Of samples, in seconds.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(mut seconds: Vec<f64>) -> Self {
        assert!(!seconds.is_empty(), "a timing of no samples");
        seconds.sort_by(f64::total_cmp);
        let last = seconds.len() - 1;
        let median = 0.5 * (seconds[last / 2] + seconds[last.div_ceil(2)]);
        Self { median, min: seconds[0], max: seconds[last] }
    }
}

/// A device under measurement.
pub struct Bench<B: Backend> {
    /// What is measured.
    pub device: B,
    /// For how long.
    pub sampling: Sampling,
}

impl<B: Backend> Bench<B> {
    /// Times what `enqueue` enqueues, by the host's clock around a wait for all streams. The first call is a warm-up: it may
    /// compile.
    ///
    /// # Errors
    /// Of the device.
    pub fn time(&self, mut enqueue: impl FnMut()) -> Result<Timing> {
        let mut run = |calls: usize| -> Result<f64> {
            let started = Instant::now();
            (0..calls).for_each(|_| enqueue());
            self.device.synchronize()?;
            Ok(started.elapsed().as_secs_f64())
        };
        run(1)?;
        let goal = self.sampling.sample.as_secs_f64();
        let mut calls = 1;
        // Few calls hide a GPU's launches less well, so the estimate grows with what it is based on.
        loop {
            let elapsed = run(calls)?;
            if elapsed >= goal || calls >= MOST_CALLS {
                break;
            }
            let needed = (calls as f64 * 1.1 * goal / elapsed.max(1e-9)).ceil() as usize;
            calls = needed.clamp(calls + 1, 16 * calls).min(MOST_CALLS);
        }
        let seconds = (0..self.sampling.samples.max(1)).map(|_| run(calls).map(|elapsed| elapsed / calls as f64));
        Ok(Timing::of(seconds.collect::<Result<_>>()?))
    }

    /// A tensor of normal values: a GPU multiplies zeros faster, because it draws less power.
    fn normal(&self, dtype: DType, shape: &[usize], std: f32, seed: u64) -> Result<Tensor<B>> {
        let mut tensor = new_tensor(&self.device, dtype, shape)?;
        self.device.fill_normal(&mut tensor, std, seed);
        Ok(tensor)
    }

    /// The same in the device's compute dtype, with a standard deviation of 1.
    fn activation(&self, shape: &[usize], seed: u64) -> Result<Tensor<B>> {
        self.normal(self.device.compute_dtype(), shape, 1.0, seed)
    }
}

/// Calls between two waits, at most: more only fill the driver's queue.
const MOST_CALLS: usize = 100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_in_the_middle() {
        assert_eq!(Timing::of(vec![3.0, 1.0, 2.0]), Timing { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Timing::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Timing::of(vec![1.5]), Timing { median: 1.5, min: 1.5, max: 1.5 });
    }
}
