//! [`OptimOps`] on the GPU.

use super::args::int;
use super::module::Unit;
use super::{Cuda, Kernel, Launch};
use crate::DType::{Bf16, F32, F64};
use crate::ops::moments::BLOCK_ELEMENTS;
use crate::ops::optim::{AdamW, AdamWState, Clip, Moment, OptimOps};
use crate::{DType, Tensor};

pub(super) static UNIT: Unit =
    Unit { stem: "optim", source: include_str!("../../kernels/optim.cu"), variants: &[&[]], only: None };

/// AdamW's kernels.
pub(super) static ADAMW: Unit =
    Unit { stem: "adamw", source: include_str!("../../kernels/adamw.cu"), variants: &[&[]], only: None };

#[repr(C)]
#[derive(Clone, Copy)]
struct FillParams {
    x: u64,
    len: i64,
    value: f32,
    dtype: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CopyParams {
    dst: u64,
    src: u64,
    len: i64,
    dst_dtype: i32,
    src_dtype: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FillNormalParams {
    x: u64,
    len: i64,
    seed: u64,
    std: f32,
    dtype: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumSquaresParams {
    partial: u64,
    x: u64,
    len: i64,
    dtype: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AddSquaresParams {
    out: u64,
    partial: u64,
    num_parts: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AdamwParams {
    w: u64,
    master: u64,
    m: u64,
    v: u64,
    m_scales: u64,
    v_scales: u64,
    grad: u64,
    norm_squared: u64,
    len: i64,
    seed: u64,
    first: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    correction1: f32,
    correction2: f32,
    max_norm: f32,
}

/// Thread blocks of a sum: fixed, so that the order of the sum does not depend on the GPU.
const SUM_BLOCKS: usize = 1024;

/// Elements of one thread in AdamW: a warp has a block of moments.
const ADAMW_ELEMENTS: usize = BLOCK_ELEMENTS / 32;

fn code(dtype: DType) -> i32 {
    match dtype {
        Bf16 => 0,
        F32 => 1,
        F64 => 2,
        DType::U8 => 3,
        DType::U32 => panic!("an op on floats or bytes got U32"),
    }
}

impl Cuda {
    /// Thread blocks for a loop over `len` elements, `each` per thread at a time.
    fn over(&self, len: usize, each: usize) -> Launch {
        let blocks = len.div_ceil(256 * each) as u64;
        Launch::linear(blocks.min(u64::from(self.shared.multiprocessors) * 16), 256)
    }

    fn optim_kernel(name: &'static str) -> Kernel<'static> {
        Kernel { unit: &UNIT, defines: &[], name }
    }
}

impl OptimOps for Cuda {
    fn fill(&self, x: &mut Tensor<Self>, value: f32) {
        let params = FillParams { x: self.pointer(x), len: x.len() as i64, value, dtype: code(x.dtype()) };
        self.launch("fill", &Self::optim_kernel("fill"), self.over(x.len(), 1), &params);
    }

    fn copy(&self, dst: &mut Tensor<Self>, src: &Tensor<Self>) {
        let fits = dst.len() == src.len() && dst.dtype().is_float() && src.dtype().is_float();
        assert!(fits, "copy: {dst:?} from {src:?}");
        let params = CopyParams {
            dst: self.pointer(dst),
            src: self.pointer(src),
            len: src.len() as i64,
            dst_dtype: code(dst.dtype()),
            src_dtype: code(src.dtype()),
        };
        self.launch("copy", &Self::optim_kernel("copy"), self.over(src.len(), 1), &params);
    }

    fn fill_normal(&self, x: &mut Tensor<Self>, std: f32, seed: u64) {
        let params = FillNormalParams { x: self.pointer(x), len: x.len() as i64, seed, std, dtype: code(x.dtype()) };
        self.launch("fill_normal", &Self::optim_kernel("fill_normal"), self.over(x.len(), 1), &params);
    }

    fn sum_squares(&self, out: &mut Tensor<Self>, x: &Tensor<Self>) {
        let op = self.op("sum_squares");
        let (out, len) = (op.at("out", out, F64, &[1]), x.len());
        let dtype = if x.dtype() == Bf16 { Bf16 } else { F32 };
        let x = op.at("x", x, dtype, x.shape());
        let (partial, _) = self.scratch();
        let parts = len.div_ceil(1024).clamp(1, SUM_BLOCKS);
        let params = SumSquaresParams { partial, x, len: len as i64, dtype: code(dtype) };
        self.launch(op.name, &Self::optim_kernel("sum_squares"), Launch::linear(parts as u64, 256), &params);
        let params = AddSquaresParams { out, partial, num_parts: int(parts) };
        self.launch(op.name, &Self::optim_kernel("add_squares"), Launch::linear(1, 256), &params);
    }

    fn adamw(
        &self,
        w: &mut Tensor<Self>,
        state: AdamWState<'_, Self>,
        grad: &Tensor<Self>,
        hyper: AdamW,
        clip: Option<Clip<'_, Self>>,
    ) {
        let op = self.op("adamw");
        let shape = w.shape();
        let correction = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(f64::from(hyper.step)))) as f32;
        let dtype = state.m.values.dtype();
        let name = match dtype {
            Bf16 => "adamw_bf16",
            DType::U8 => "adamw_u8",
            _ => "adamw_f32",
        };
        let moment = |names: [&str; 2], moment: Moment<'_, Self>| {
            let codes = dtype == DType::U8;
            assert_eq!(codes, moment.scales.is_some(), "{}: {} is {:?}: codes have scales", op.name, names[0], moment.values);
            let scales = moment.scales.map_or(0, |scales| op.at(names[1], scales, F32, &[w.len().div_ceil(BLOCK_ELEMENTS)]));
            let dtype = if matches!(dtype, Bf16 | DType::U8) { dtype } else { F32 };
            (op.at(names[0], moment.values, dtype, shape), scales)
        };
        let (m, m_scales) = moment(["m", "m's scales"], state.m);
        let (v, v_scales) = moment(["v", "v's scales"], state.v);
        let params = AdamwParams {
            w: op.at("w", w, Bf16, shape),
            master: state.master.map_or(0, |master| op.at("master", master, F32, shape)),
            m,
            v,
            m_scales,
            v_scales,
            grad: op.at("grad", grad, F32, shape),
            norm_squared: clip.as_ref().map_or(0, |clip| op.at("norm_squared", clip.norm_squared, F64, &[1])),
            len: w.len() as i64,
            seed: state.random.seed,
            first: state.random.first,
            lr: hyper.lr,
            beta1: hyper.beta1,
            beta2: hyper.beta2,
            eps: hyper.eps,
            weight_decay: hyper.weight_decay,
            correction1: correction(hyper.beta1),
            correction2: correction(hyper.beta2),
            max_norm: clip.map_or(0.0, |clip| clip.max_norm),
        };
        let kernel = Kernel { unit: &ADAMW, defines: &[], name };
        self.launch(op.name, &kernel, self.over(w.len(), ADAMW_ELEMENTS), &params);
    }
}
