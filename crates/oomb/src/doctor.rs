//! Every op of a device beside the CPU's: the same inputs through three backends, and a verdict for each output. It must not
//! know terminals, nor which device it examines, so that tests and `oomb doctor` judge alike.
//!
//! The bar is the one of the FlashAttention tests: a device that stores bf16 may be twice as far from the exact result (the
//! CPU in f64) as the CPU is when it stores bf16, and a floor beyond that (see [`Kind`]).

mod attention;
mod cases;
mod machine;
mod moments;
mod rig;

pub use attention::{AttentionSizes, Sees};
pub use cases::{Case, cases};
pub use machine::{Facts, Problem};

use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::{Backend, DType, Result};
use rig::{Output, Rig};

/// How an output is stored and summed, which decides what error is allowed beyond twice the reference's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Rounded to the compute dtype on store, or summed in f32. Floor 2^-15 of the result's norm: f32 sums in another order
    /// differ by less, and tensor cores, which drop low bits of their sums, as well.
    Stored,
    /// In f32, but from factors that tensor cores take in bf16: probabilities and their gradients, inside attention. Each is
    /// rounded by at most 2^-9 of itself, in two products one after the other: floor 2^-8.
    RoundedInside,
    /// Rounded stochastically to bf16 or less, on every device: one that computes in f32 has a reference here too. The
    /// same floor.
    Stochastic,
}

impl Kind {
    fn floor(self) -> f64 {
        match self {
            Self::Stored => 1.0 / 32_768.0,
            Self::RoundedInside | Self::Stochastic => 1.0 / 256.0,
        }
    }
}

/// Allowed on a device that computes in f32, with no reference: a few roundings of f32, at sums of some hundred terms.
const F32_ALLOWED: f64 = 2e-6;

/// One output of one op at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// `"rmsnorm_backward"`.
    pub op: &'static str,
    /// `"dx"`.
    pub output: &'static str,
    /// In words.
    pub size: String,
    /// Distance from the exact result over that result's norm, both Euclidean. Not a number where the device left one.
    pub error: f64,
    /// The largest error that is fine.
    pub allowed: f64,
}

impl Comparison {
    /// Whether the error is allowed; an error that is no number is not.
    pub fn is_fine(&self) -> bool {
        self.error <= self.allowed
    }
}

/// Runs `cases` on `device` and on the CPU and compares every output.
///
/// # Errors
/// Of the device: memory, or a kernel that did not run.
pub fn compare<B: Backend>(device: &B, cases: &[Case]) -> Result<Vec<Comparison>> {
    let cpu = |real, compute_dtype| Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
    let (exact, rounded) = (cpu(Real::F64, DType::F32), cpu(Real::F32, DType::Bf16));
    let (exact, rounded, examined) = (Rig::exact(&exact), Rig::new(&rounded), Rig::new(device));
    let mut comparisons = Vec::new();
    for case in cases {
        let (exact, reference, got) = (case.run(&exact)?, case.run(&rounded)?, case.run(&examined)?);
        assert!(exact.len() == reference.len() && exact.len() == got.len(), "{case:?}: outputs differ in number");
        for ((exact, reference), got) in exact.iter().zip(&reference).zip(&got) {
            let rounds = device.compute_dtype() == DType::Bf16 || exact.kind == Kind::Stochastic;
            let reference = rounds.then_some(reference);
            comparisons.push(judge(&case.size(), exact, reference, got));
        }
    }
    Ok(comparisons)
}

fn judge(size: &str, exact: &Output, reference: Option<&Output>, got: &Output) -> Comparison {
    let allowed = reference.map_or(F32_ALLOWED, |rounded| 2.0 * distance(&rounded.values, &exact.values) + exact.kind.floor());
    let error = distance(&got.values, &exact.values);
    Comparison { op: exact.op, output: exact.name, size: size.to_owned(), error, allowed }
}

/// `|a - b| / |b|`.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "outputs of different lengths");
    let norm = |squares: f64| squares.sqrt();
    let difference = norm(a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum());
    difference / norm(b.iter().map(|b| b * b).sum()).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(kind: Kind, values: &[f64]) -> Output {
        Output { op: "op", name: "y", kind, values: values.to_vec() }
    }

    #[test]
    fn twice_the_reference_error_is_the_limit() {
        let exact: Vec<f64> = (0..1000).map(|i| f64::from(i).sin()).collect();
        let off = |by: f64| output(Kind::Stored, &exact.iter().map(|x| x * (1.0 + by)).collect::<Vec<_>>());
        let verdict = |by| judge("", &off(0.0), Some(&off(2e-3)), &off(by)).is_fine();
        assert!(verdict(0.0) && verdict(3.9e-3) && verdict(-4e-3));
        assert!(!verdict(4.1e-3) && !verdict(-5e-3));
        assert!(judge("", &off(0.0), None, &off(1e-6)).is_fine());
        assert!(!judge("", &off(0.0), None, &off(1e-5)).is_fine());
    }

    #[test]
    fn one_wrong_element_of_thousands_is_seen() {
        let exact: Vec<f64> = (0..7000).map(|i| f64::from(i).sin()).collect();
        let rounded: Vec<f64> = exact.iter().map(|x| f64::from(half::bf16::from_f64(*x))).collect();
        for wrong in [0.0, 2.0, f64::NAN, f64::INFINITY] {
            let mut got = rounded.clone();
            got[4321] = wrong;
            let verdict =
                judge("", &output(Kind::Stored, &exact), Some(&output(Kind::Stored, &rounded)), &output(Kind::Stored, &got));
            assert!(!verdict.is_fine(), "{verdict:?}");
        }
    }
}
