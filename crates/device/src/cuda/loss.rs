//! [`LossOps`] on the GPU.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch};
use crate::DType::{Bf16, F32, U32};
use crate::Tensor;
use crate::ops::loss::LossOps;

pub(super) static UNIT: Unit = Unit { stem: "loss", source: include_str!("../../kernels/loss.cu"), variants: &[&[]], only: None };

#[repr(C)]
#[derive(Clone, Copy)]
struct CrossEntropyParams {
    loss: u64,
    logits: u64,
    labels: u64,
    v: i32,
    weight: f32,
    backward: i32,
}

impl LossOps for Cuda {
    fn cross_entropy_forward(&self, loss: &mut Tensor<Self>, logits: &Tensor<Self>, labels: &Tensor<Self>) {
        self.cross_entropy("cross_entropy_forward", (loss, logits, labels), None);
    }

    fn cross_entropy_backward(&self, loss: &mut Tensor<Self>, logits: &mut Tensor<Self>, labels: &Tensor<Self>, weight: f32) {
        self.cross_entropy("cross_entropy_backward", (loss, logits, labels), Some(weight));
    }
}

impl Cuda {
    fn cross_entropy(
        &self,
        name: &'static str,
        (loss, logits, labels): (&Tensor<Self>, &Tensor<Self>, &Tensor<Self>),
        weight: Option<f32>,
    ) {
        let op = self.op(name);
        let (t, v) = (logits.rows(), logits.dim(1));
        let params = CrossEntropyParams {
            loss: op.at("loss", loss, F32, &[t]),
            logits: op.at("logits", logits, Bf16, &[t, v]),
            labels: op.at("labels", labels, U32, &[t]),
            v: int(v),
            weight: weight.unwrap_or(0.0),
            backward: i32::from(weight.is_some()),
        };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "cross_entropy" };
        self.launch(name, &kernel, Launch::linear(t as u64, 512), &params);
    }
}
