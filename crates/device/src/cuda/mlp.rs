//! [`MlpOps`] on the GPU.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch};
use crate::DType::Bf16;
use crate::Tensor;
use crate::ops::mlp::MlpOps;

pub(super) static UNIT: Unit = Unit { stem: "mlp", source: include_str!("../../kernels/mlp.cu"), variants: &[&[]], only: None };

#[repr(C)]
#[derive(Clone, Copy)]
struct SwigluParams {
    y: u64,
    gate_up: u64,
    num_rows: i64,
    f: i32,
}

impl MlpOps for Cuda {
    fn swiglu_forward(&self, y: &mut Tensor<Self>, gate_up: &Tensor<Self>) {
        self.swiglu("swiglu_forward", y, gate_up);
    }

    fn swiglu_backward(&self, gate_up: &mut Tensor<Self>, dy: &mut Tensor<Self>) {
        self.swiglu("swiglu_backward", dy, gate_up);
    }
}

impl Cuda {
    fn swiglu(&self, name: &'static str, y: &Tensor<Self>, gate_up: &Tensor<Self>) {
        /// The largest second dimension of a grid; further rows go into the third.
        const GRID_ROWS: usize = 65_535;
        let op = self.op(name);
        let (t, f) = (y.rows(), y.dim(1));
        let params = SwigluParams {
            y: op.at("y", y, Bf16, &[t, f]),
            gate_up: op.at("gate_up", gate_up, Bf16, &[t, 2 * f]),
            num_rows: t as i64,
            f: int(f),
        };
        let blocks = [f.div_ceil(2048) as u32, t.min(GRID_ROWS) as u32, t.div_ceil(GRID_ROWS) as u32];
        let kernel = Kernel { unit: &UNIT, defines: &[], name };
        self.launch(name, &kernel, Launch { blocks, threads: 256, shared_bytes: 0 }, &params);
    }
}
