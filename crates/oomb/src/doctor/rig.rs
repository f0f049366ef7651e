//! A device, shorthands for its tensors, and values that every device holds exactly. It must not know any op.

use super::Kind;
use crate::random;
use half::bf16;
use oomb_device::device::tensor_from;
use oomb_device::{Backend, DType, HostData, Result, Tensor};

/// Where a case runs.
pub(super) struct Rig<'a, B: Backend> {
    pub(super) device: &'a B,
    /// Of activations.
    pub(super) act: DType,
    /// Of page gradients that devices store in bf16.
    pub(super) bf16_pages: DType,
}

/// What an op left.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Output {
    pub(super) op: &'static str,
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) values: Vec<f64>,
}

impl<'a, B: Backend> Rig<'a, B> {
    pub(super) fn new(device: &'a B) -> Self {
        Self { device, act: device.compute_dtype(), bf16_pages: DType::Bf16 }
    }

    /// Where nothing is rounded, those pages included.
    pub(super) fn exact(device: &'a B) -> Self {
        Self { bf16_pages: DType::F32, ..Self::new(device) }
    }

    pub(super) fn activation(&self, shape: &[usize], values: &[f64]) -> Result<Tensor<B>> {
        self.tensor(self.act, shape, values)
    }

    pub(super) fn f32(&self, shape: &[usize], values: &[f64]) -> Result<Tensor<B>> {
        self.tensor(DType::F32, shape, values)
    }

    pub(super) fn tensor(&self, dtype: DType, shape: &[usize], values: &[f64]) -> Result<Tensor<B>> {
        tensor_from(self.device, dtype, shape, HostData::F64(values))
    }

    pub(super) fn ids(&self, ids: &[u32]) -> Result<Tensor<B>> {
        tensor_from(self.device, DType::U32, &[ids.len()], HostData::U32(ids))
    }

    /// Full of NaN: what an op that overwrites must not read.
    pub(super) fn void(&self, dtype: DType, shape: &[usize]) -> Result<Tensor<B>> {
        self.tensor(dtype, shape, &vec![f64::NAN; shape.iter().product()])
    }

    pub(super) fn get(&self, tensor: &Tensor<B>) -> Result<Vec<f64>> {
        self.device.download_f64(tensor)
    }
}

/// Collects the outputs of one op.
pub(super) struct Outputs<'a, B: Backend> {
    rig: &'a Rig<'a, B>,
    op: &'static str,
    pub(super) list: Vec<Output>,
}

impl<'a, B: Backend> Outputs<'a, B> {
    pub(super) fn new(rig: &'a Rig<'a, B>) -> Self {
        Self { rig, op: "", list: Vec::new() }
    }

    /// What follows is of this op.
    pub(super) fn of(&mut self, op: &'static str) -> &mut Self {
        self.op = op;
        self
    }

    /// What a tensor holds.
    pub(super) fn add(&mut self, name: &'static str, tensor: &Tensor<B>) -> Result<&mut Self> {
        let values = self.rig.get(tensor)?;
        Ok(self.values(name, Kind::Stored, values))
    }

    /// What was added to a tensor that held `before`.
    pub(super) fn added(&mut self, name: &'static str, kind: Kind, tensor: &Tensor<B>, before: &[f64]) -> Result<&mut Self> {
        let after = self.rig.get(tensor)?;
        Ok(self.values(name, kind, after.iter().zip(before).map(|(after, before)| after - before).collect()))
    }

    pub(super) fn values(&mut self, name: &'static str, kind: Kind, values: Vec<f64>) -> &mut Self {
        self.list.push(Output { op: self.op, name, kind, values });
        self
    }
}

/// A reproducible series of values for tensors.
pub(super) struct Random(random::Random);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(random::Random::new(seed))
    }

    /// Uniform in (-1, 1), each exactly a bf16, so that every device starts from the same numbers.
    pub(super) fn values(&mut self, len: usize) -> Vec<f64> {
        self.scaled(len, 1.0)
    }

    /// The same times a power of two.
    pub(super) fn scaled(&mut self, len: usize, scale: f64) -> Vec<f64> {
        (0..len).map(|_| scale * bf16::from_f64(0.99 * (2.0 * self.0.unit() - 1.0)).to_f64()).collect()
    }

    /// Below `end`.
    pub(super) fn ids(&mut self, len: usize, end: u32) -> Vec<u32> {
        (0..len).map(|_| (self.0.bits() % u64::from(end)) as u32).collect()
    }

    /// `num` distinct slots of `of`, in random order.
    pub(super) fn slots(&mut self, num: usize, of: usize) -> Vec<u32> {
        let mut slots: Vec<_> = (0..of as u32).map(|slot| (self.0.bits(), slot)).collect();
        slots.sort_unstable();
        slots.into_iter().take(num).map(|(_, slot)| slot).collect()
    }
}
