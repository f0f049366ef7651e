//! [`EmbedOps`] on the GPU.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch};
use crate::DType::{Bf16, F32, U32};
use crate::Tensor;
use crate::ops::embed::EmbedOps;

pub(super) static UNIT: Unit =
    Unit { stem: "embed", source: include_str!("../../kernels/embed.cu"), variants: &[&[]], only: None };

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    x: u64,
    table: u64,
    ids: u64,
    d: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    dtable: u64,
    dx: u64,
    ids: u64,
    num_tokens: i32,
    d: i32,
}

impl EmbedOps for Cuda {
    fn embed_forward(&self, x: &mut Tensor<Self>, table: &Tensor<Self>, ids: &Tensor<Self>) {
        let op = self.op("embed_forward");
        let (t, d) = (x.rows(), x.dim(1));
        let params = ForwardParams {
            x: op.at("x", x, Bf16, &[t, d]),
            table: op.at("table", table, Bf16, &[table.rows(), d]),
            ids: op.at("ids", ids, U32, &[t]),
            d: int(d),
        };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "embed_forward" };
        self.launch(op.name, &kernel, Launch::linear(t as u64, 128), &params);
    }

    fn embed_backward(&self, dtable: &mut Tensor<Self>, dx: &Tensor<Self>, ids: &Tensor<Self>) {
        let op = self.op("embed_backward");
        let (t, d) = (dx.rows(), dx.dim(1));
        let params = BackwardParams {
            dtable: op.at("dtable", dtable, F32, &[dtable.rows(), d]),
            dx: op.at("dx", dx, Bf16, &[t, d]),
            ids: op.at("ids", ids, U32, &[t]),
            num_tokens: int(t),
            d: int(d),
        };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "embed_backward" };
        self.launch(op.name, &kernel, Launch::linear(t as u64, 256), &params);
    }
}
