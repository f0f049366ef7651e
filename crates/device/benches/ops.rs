//! Throughput of every CPU op but attention, beside the machine's copy and product rates.
//!
//! `cargo bench -p oomb-device --bench ops` prints milliseconds and GB/s (least bytes moved) or GFLOP/s per op. It must
//! not know how any op works.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use oomb_device::cpu::Cpu;
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::attention::{PageRef, Pages};
use oomb_device::ops::embed::EmbedOps;
use oomb_device::ops::linear::{Epilogue, LinearOps, Write};
use oomb_device::ops::loss::LossOps;
use oomb_device::ops::mlp::MlpOps;
use oomb_device::ops::norm::NormOps;
use oomb_device::ops::optim::{AdamW, AdamWState, Moment, OptimOps, RandomBits};
use oomb_device::ops::rope::{QkNorm, QkNormGrad, RopeOps};
use oomb_device::{DType, Device, HostData, Tensor};
use std::time::Instant;

// SmolLM2-135M's layer at a chunk of 2048 tokens; loss in a tile of 256.
const T: usize = 2048;
const D: usize = 576;
const F: usize = 1536;
const H: usize = 9;
const G: usize = 3;
const DH: usize = 64;
const P: usize = 128;
const V: usize = 49_152;
const TILE: usize = 256;

/// What a rate counts.
enum Work {
    /// Elements of 4 bytes, each read or written once.
    Elements(usize),
    /// Multiplications and additions.
    Flops(usize),
}

struct Bench {
    cpu: Cpu,
}

impl Bench {
    fn tensor(&self, shape: &[usize]) -> Tensor<Cpu> {
        let mut x = new_tensor(&self.cpu, DType::F32, shape).unwrap();
        self.cpu.fill_normal(&mut x, 1.0, shape.len() as u64);
        x
    }

    fn ids(&self, len: usize) -> Tensor<Cpu> {
        let ids: Vec<u32> = (0..len as u32).map(|i| i * 7919 % V as u32).collect();
        tensor_from(&self.cpu, DType::U32, &[len], HostData::U32(&ids)).unwrap()
    }

    /// The best of several runs, each of as many calls as take a tenth of a second.
    fn time(&self, name: &str, work: Work, mut op: impl FnMut()) {
        let mut run = |calls: usize| {
            let start = Instant::now();
            (0..calls).for_each(|_| op());
            self.cpu.synchronize().unwrap();
            start.elapsed().as_secs_f64() / calls as f64
        };
        run(1);
        let calls = (0.1 / run(1)).ceil().clamp(1.0, 1000.0) as usize;
        let seconds = (0..5).map(|_| run(calls)).fold(f64::INFINITY, f64::min);
        let rate = match work {
            Work::Elements(elements) => format!("{:8.1} GB/s", 4.0 * elements as f64 / seconds / 1e9),
            Work::Flops(flops) => format!("{:8.1} GFLOP/s", flops as f64 / seconds / 1e9),
        };
        println!("{name:<32} {:9.3} ms {rate}", 1e3 * seconds);
    }
}

fn main() {
    let bench = Bench { cpu: Cpu::default() };
    whole_tensors(&bench);
    rows(&bench);
    products(&bench);
    heads(&bench);
    vocabulary(&bench);
}

fn whole_tensors(bench: &Bench) {
    let cpu = &bench.cpu;
    let len = V * D / 4;
    let (mut x, mut y) = (bench.tensor(&[len]), bench.tensor(&[len]));
    let (mut m, mut v) = (bench.tensor(&[len]), bench.tensor(&[len]));
    let mut norm = new_tensor(cpu, DType::F64, &[1]).unwrap();
    bench.time("copy", Work::Elements(2 * len), || cpu.copy(&mut x, &y));
    bench.time("fill", Work::Elements(len), || cpu.fill(&mut m, 0.0));
    bench.time("sum_squares", Work::Elements(len), || cpu.sum_squares(&mut norm, &x));
    bench.time("fill_normal", Work::Elements(len), || cpu.fill_normal(&mut x, 1.0, 1));
    cpu.fill(&mut v, 1.0);
    let hyper = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 };
    bench.time("adamw", Work::Elements(7 * len), || {
        let [m, v] = [&mut m, &mut v].map(|values| Moment { values, scales: None });
        cpu.adamw(&mut y, AdamWState { master: None, m, v, random: RandomBits::default() }, &x, hyper, None);
    });
}

fn rows(bench: &Bench) {
    let cpu = &bench.cpu;
    let (x, dy, weight) = (bench.tensor(&[T, D]), bench.tensor(&[T, D]), bench.tensor(&[D]));
    let (mut y, mut dx, mut rstd, mut dweight) =
        (bench.tensor(&[T, D]), bench.tensor(&[T, D]), bench.tensor(&[T]), bench.tensor(&[D]));
    bench.time("rmsnorm_forward", Work::Elements(2 * T * D), || cpu.rmsnorm_forward(&mut y, &mut rstd, &x, &weight, 1e-6));
    bench.time("rmsnorm_backward", Work::Elements(4 * T * D), || {
        cpu.rmsnorm_backward(&mut dx, Some(&mut dweight), &dy, &x, &rstd, &weight);
    });
    bench.time("linear_backward_bias", Work::Elements(T * D), || cpu.linear_backward_bias(&mut dweight, &dy));
    let (mut gate_up, mut y) = (bench.tensor(&[T, 2 * F]), bench.tensor(&[T, F]));
    bench.time("swiglu_forward", Work::Elements(3 * T * F), || cpu.swiglu_forward(&mut y, &gate_up));
    bench.time("swiglu_backward", Work::Elements(5 * T * F), || cpu.swiglu_backward(&mut gate_up, &mut y));
}

fn products(bench: &Bench) {
    let cpu = &bench.cpu;
    for (name, n, k) in [("qkv", (H + 2 * G) * DH, D), ("gate_up", 2 * F, D), ("down", D, F)] {
        let (mut x, w, mut y) = (bench.tensor(&[T, k]), bench.tensor(&[n, k]), bench.tensor(&[T, n]));
        let (mut dw, residual) = (bench.tensor(&[n, k]), bench.tensor(&[T, n]));
        let flops = 2 * T * n * k;
        bench.time(&format!("{name} forward"), Work::Flops(flops), || cpu.linear_forward(&mut y, &x, &w, Epilogue::None));
        bench.time(&format!("{name} forward + residual"), Work::Flops(flops), || {
            cpu.linear_forward(&mut y, &x, &w, Epilogue::Residual(&residual));
        });
        bench.time(&format!("{name} backward weight"), Work::Flops(flops), || {
            cpu.linear_backward_weight(&mut dw, &y, &x, Write::Accumulate);
        });
        bench.time(&format!("{name} backward input"), Work::Flops(flops), || {
            cpu.linear_backward_input(&mut x, &y, &w, Write::Overwrite);
        });
    }
}

fn heads(bench: &Bench) {
    let cpu = &bench.cpu;
    let width = (H + 2 * G) * DH;
    let (mut qkv, mut q) = (bench.tensor(&[T, width]), bench.tensor(&[T, H, DH]));
    let slab = bench.tensor(&[T / P, 2, G, P, DH]);
    let refs: Vec<PageRef> = (0..(T / P) as u32).map(|index| PageRef { slot: index, index }).collect();
    let mut table = bench.tensor(&[T, DH / 2, 2]);
    let inv_freq: Vec<f64> = (0..DH / 2).map(|d| 10_000f64.powf(-2.0 * d as f64 / DH as f64)).collect();
    let inv_freq = tensor_from(cpu, DType::F64, &[DH / 2], HostData::F64(&inv_freq)).unwrap();
    let positions = bench.ids(T);
    bench.time("rope_table", Work::Elements(T * DH), || cpu.rope_table(&mut table, &positions, &inv_freq, 1.0));
    let pages = || Pages { slab: &slab, refs: &refs };
    let elements = 2 * T * width;
    bench.time("qkv_forward", Work::Elements(elements), || cpu.qkv_forward(&mut q, Some(pages()), 0, &qkv, None, &table));
    bench.time("qkv_backward", Work::Elements(elements), || cpu.qkv_backward(&mut qkv, &q, pages(), None, &table));
    let (q_weight, k_weight) = (bench.tensor(&[DH]), bench.tensor(&[DH]));
    let (mut dq_weight, mut dk_weight) = (bench.tensor(&[DH]), bench.tensor(&[DH]));
    let norm = || QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: 1e-6 };
    bench.time("qkv_forward, normed", Work::Elements(elements), || {
        cpu.qkv_forward(&mut q, Some(pages()), 0, &qkv, Some(norm()), &table);
    });
    bench.time("qkv_backward, normed", Work::Elements(elements), || {
        let grad = QkNormGrad { dq_weight: &mut dq_weight, dk_weight: &mut dk_weight };
        cpu.qkv_backward(&mut qkv, &q, pages(), Some((norm(), Some(grad))), &table);
    });
}

fn vocabulary(bench: &Bench) {
    let cpu = &bench.cpu;
    let (mut x, table, ids) = (bench.tensor(&[T, D]), bench.tensor(&[V, D]), bench.ids(T));
    bench.time("embed_forward", Work::Elements(2 * T * D), || cpu.embed_forward(&mut x, &table, &ids));
    let mut dtable = bench.tensor(&[V, D]);
    bench.time("embed_backward", Work::Elements(3 * T * D), || cpu.embed_backward(&mut dtable, &x, &ids));
    let (mut logits, mut loss, labels) = (bench.tensor(&[TILE, V]), bench.tensor(&[TILE]), bench.ids(TILE));
    bench.time("cross_entropy_forward", Work::Elements(TILE * V), || cpu.cross_entropy_forward(&mut loss, &logits, &labels));
    bench.time("cross_entropy_backward", Work::Elements(2 * TILE * V), || {
        cpu.cross_entropy_backward(&mut loss, &mut logits, &labels, 1e-3);
    });
}
