//! Devices, tensors and random values for the op tests, and the comparison of one op in every precision.
//!
//! It must not know any op.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use half::bf16;
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::device::tensor_from;
use oomb_device::{DType, Device, HostData, Tensor};
use std::time::{SystemTime, UNIX_EPOCH};

/// A CPU device and shorthands for its tensors.
pub struct Rig {
    pub cpu: Cpu,
    /// Dtype of activations.
    pub act: DType,
}

impl Rig {
    /// Arithmetic and activations of these types.
    pub fn new(real: Real, compute_dtype: DType) -> Self {
        Self { cpu: Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() }), act: compute_dtype }
    }

    /// f64 without rounding: what everything else is measured against.
    pub fn reference() -> Self {
        Self::new(Real::F64, DType::F32)
    }

    /// A tensor of the compute dtype.
    pub fn activation(&self, shape: &[usize], values: &[f64]) -> Tensor<Cpu> {
        self.tensor(self.act, shape, values)
    }

    /// A tensor of a float dtype.
    pub fn tensor(&self, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor<Cpu> {
        tensor_from(&self.cpu, dtype, shape, HostData::F64(values)).unwrap()
    }

    /// A tensor full of NaN: what an op that overwrites must not read.
    pub fn void(&self, dtype: DType, shape: &[usize]) -> Tensor<Cpu> {
        self.tensor(dtype, shape, &vec![f64::NAN; shape.iter().product()])
    }

    /// The elements.
    pub fn get(&self, tensor: &Tensor<Cpu>) -> Vec<f64> {
        self.cpu.download_f64(tensor).unwrap()
    }
}

/// Uniform random values; the seed is printed, which a failing test shows.
pub struct Random(u64);

impl Random {
    /// Seeded by `OOMB_TEST_SEED`, or afresh.
    pub fn fresh() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = std::env::var("OOMB_TEST_SEED").map_or(now, |seed| seed.parse().unwrap());
        println!("random inputs: OOMB_TEST_SEED={seed} repeats them");
        Self(seed | 1)
    }

    fn bits(&mut self) -> u64 {
        // xorshift64*, Vigna 2016.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Within (-1, 1), ends excluded after rounding too; each exactly a bf16 so that every device starts from the same numbers.
    pub fn values(&mut self, len: usize) -> Vec<f64> {
        let mut value = || bf16::from_f32(0.99 * ((self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)).to_f64();
        (0..len).map(|_| value()).collect()
    }
}

/// A result of an op.
pub struct Output {
    pub name: &'static str,
    pub dtype: DType,
    pub values: Vec<f64>,
}

impl Output {
    /// The elements of a tensor, under a name for messages.
    pub fn new(rig: &Rig, name: &'static str, tensor: &Tensor<Cpu>) -> Self {
        Self { name, dtype: tensor.dtype(), values: rig.get(tensor) }
    }
}

/// Runs an op in every precision on the same inputs: f32 agrees with f64 to f32 rounding; bf16 tags over f64 arithmetic
/// give the f64 result rounded once; bf16 tags over f32 arithmetic give bf16 numbers within a rounding of it.
pub fn agree(run: impl Fn(&Rig) -> Vec<Output>) {
    let exact = run(&Rig::reference());
    for (single, exact) in run(&Rig::new(Real::F32, DType::F32)).iter().zip(&exact) {
        let error = distance(&single.values, &exact.values);
        assert!(error < 1e-6, "{}: f32 is {error:e} from f64", exact.name);
    }
    for (rounded, exact) in run(&Rig::new(Real::F64, DType::Bf16)).iter().zip(&exact) {
        let expected: Vec<f64> = exact.values.iter().map(|&x| stored(rounded.dtype, x)).collect();
        assert_eq!(rounded.values, expected, "{}: bf16 over f64", exact.name);
    }
    for (rounded, exact) in run(&Rig::new(Real::F32, DType::Bf16)).iter().zip(&exact) {
        let largest = exact.values.iter().fold(0.0f64, |a, b| a.max(b.abs()));
        for (&got, &exact_value) in rounded.values.iter().zip(&exact.values) {
            assert_eq!(got, stored(rounded.dtype, got), "{}: not a bf16", exact.name);
            let allowed = if rounded.dtype == DType::Bf16 { exact_value.abs() / 256.0 } else { 0.0 } + 2e-6 * largest;
            assert!((got - exact_value).abs() <= allowed, "{}: {got} for {exact_value}", exact.name);
        }
    }
}

/// The nearest value of the dtype. From f64 through f32 would round twice, so bf16 is the nearest of three candidates.
fn stored(dtype: DType, x: f64) -> f64 {
    if dtype != DType::Bf16 {
        return x;
    }
    let bits = bf16::from_f32(x as f32).to_bits();
    let candidates = [bits, bits.saturating_sub(1), bits.saturating_add(1)].map(bf16::from_bits);
    let key = |y: &bf16| ((y.to_f64() - x).abs(), y.to_bits() & 1);
    let nearest = candidates.into_iter().filter(|y| !y.is_nan()).min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap());
    nearest.unwrap().to_f64()
}

/// `|a - b| / |b|` in the Euclidean norm.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(f64::MIN_POSITIVE)
}
