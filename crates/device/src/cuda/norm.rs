//! [`NormOps`] on the GPU.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch, reduce};
use crate::DType::{Bf16, F32};
use crate::Tensor;
use crate::ops::norm::NormOps;

pub(super) static UNIT: Unit = Unit { stem: "norm", source: include_str!("../../kernels/norm.cu"), variants: &[&[]], only: None };

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardParams {
    y: u64,
    rstd: u64,
    x: u64,
    weight: u64,
    d: i32,
    eps: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardParams {
    dx: u64,
    dy: u64,
    x: u64,
    rstd: u64,
    weight: u64,
    d: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WeightParams {
    partial: u64,
    dy: u64,
    x: u64,
    rstd: u64,
    num_rows: i64,
    d: i32,
    rows_per_part: i32,
}

impl NormOps for Cuda {
    fn rmsnorm_forward(&self, y: &mut Tensor<Self>, rstd: &mut Tensor<Self>, x: &Tensor<Self>, weight: &Tensor<Self>, eps: f32) {
        let op = self.op("rmsnorm_forward");
        let (t, d) = (x.rows(), x.dim(1));
        let params = ForwardParams {
            y: op.at("y", y, Bf16, &[t, d]),
            rstd: op.at("rstd", rstd, F32, &[t]),
            x: op.at("x", x, Bf16, &[t, d]),
            weight: op.at("weight", weight, Bf16, &[d]),
            d: int(d),
            eps,
        };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "rmsnorm_forward" };
        self.launch(op.name, &kernel, Launch::linear(t as u64, 256), &params);
    }

    fn rmsnorm_backward(
        &self,
        dx: &mut Tensor<Self>,
        dweight: Option<&mut Tensor<Self>>,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        rstd: &Tensor<Self>,
        weight: &Tensor<Self>,
    ) {
        let op = self.op("rmsnorm_backward");
        let (t, d) = (x.rows(), x.dim(1));
        let dy = op.at("dy", dy, Bf16, &[t, d]);
        let (x, rstd) = (op.at("x", x, Bf16, &[t, d]), op.at("rstd", rstd, F32, &[t]));
        let dx = op.at("dx", dx, Bf16, &[t, d]);
        let params = BackwardParams { dx, dy, x, rstd, weight: op.at("weight", weight, Bf16, &[d]), d: int(d) };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "rmsnorm_backward_input" };
        self.launch(op.name, &kernel, Launch::linear(t as u64, 256), &params);

        let Some(dweight) = dweight else { return };
        let dweight = op.at("dweight", dweight, F32, &[d]);
        let (parts, per_part) = reduce::parts(t);
        let partial = self.partial(parts, d);
        let params = WeightParams { partial, dy, x, rstd, num_rows: t as i64, d: int(d), rows_per_part: int(per_part) };
        let kernel = Kernel { unit: &UNIT, defines: &[], name: "rmsnorm_backward_weight" };
        let blocks = [parts as u32, d.div_ceil(256) as u32, 1];
        self.launch(op.name, &kernel, Launch { blocks, threads: 256, shared_bytes: 0 }, &params);
        self.add_partial(op.name, dweight, partial, parts, d);
    }
}
