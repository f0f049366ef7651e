//! Every op of the CUDA backend against the CPU: its distance from f64 is at most twice that of the CPU in bf16, plus a floor where
//! the GPU rounds inside an op and the CPU does not. Without a GPU each test says that it was skipped.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use half::bf16;
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::cuda::Cuda;
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::attention::{AttentionBackward, Mask, PageRef, Pages, Part};
use oomb_device::ops::linear::{Columns, Epilogue, Write};
use oomb_device::ops::loss::IGNORE;
use oomb_device::ops::moments::{BLOCK_ELEMENTS, SmallFloat};
use oomb_device::ops::optim::{AdamW, AdamWState, Clip, Moment, RandomBits};
use oomb_device::ops::rope::{QkNorm, QkNormGrad};
use oomb_device::{Backend, DType, Device, HostData, Stream, Tensor};
use std::time::{SystemTime, UNIX_EPOCH};

fn gpu() -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error) => {
            eprintln!("skipped: no CUDA device: {error}");
            None
        }
    }
}

/// A backend, and the same inputs for each.
struct Rig<B: Backend> {
    device: B,
    act: DType,
    seed: u64,
    outputs: Vec<Output>,
}

struct Output {
    name: String,
    values: Vec<f64>,
    /// What the GPU may be off by in any case.
    floor: f64,
}

/// f32 sums in another order, approximate square roots and exponentials: some units of the last place.
const F32_FLOOR: f64 = 2e-6;
/// A bf16 result whose f32 value lies near the middle of two may be rounded to either: one unit of the last place.
const ROUNDING_FLOOR: f64 = 1.0 / 512.0;
/// p and ds are operands of tensor cores and rounded to bf16 there: 2^-9 each on average, two of them in a chain.
const TENSOR_CORE_FLOOR: f64 = 5e-3;

impl<B: Backend> Rig<B> {
    fn new(device: B, exact: bool, seed: u64) -> Self {
        let act = if exact { DType::F32 } else { DType::Bf16 };
        Self { device, act, seed, outputs: Vec::new() }
    }

    fn bits(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    fn values(&mut self, len: usize) -> Vec<f64> {
        (0..len).map(|_| bf16::from_f64((self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).to_f64()).collect()
    }

    fn float(&mut self, dtype: DType, shape: &[usize]) -> Tensor<B> {
        let values = self.values(shape.iter().product());
        tensor_from(&self.device, dtype, shape, HostData::F64(&values)).unwrap()
    }

    fn activation(&mut self, shape: &[usize]) -> Tensor<B> {
        self.float(self.act, shape)
    }

    fn void(&self, dtype: DType, shape: &[usize]) -> Tensor<B> {
        let mut tensor = new_tensor(&self.device, dtype, shape).unwrap();
        self.device.fill(&mut tensor, f32::NAN);
        tensor
    }

    fn ids(&mut self, len: usize, below: usize) -> Tensor<B> {
        let ids: Vec<u32> = (0..len).map(|_| self.below(below) as u32).collect();
        self.integers(&ids)
    }

    fn integers(&self, values: &[u32]) -> Tensor<B> {
        tensor_from(&self.device, DType::U32, &[values.len()], HostData::U32(values)).unwrap()
    }

    fn keep(&mut self, name: impl Into<String>, tensor: &Tensor<B>, floor: f64) {
        let values = self.device.download_f64(tensor).unwrap();
        let floor = if tensor.dtype() == DType::Bf16 { floor.max(ROUNDING_FLOOR) } else { floor };
        self.outputs.push(Output { name: name.into(), values, floor });
    }
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| if a == b { 0.0 } else { a - b }));
    let size = norm(&mut b.iter().copied().filter(|b| b.is_finite()));
    error / size.max(1e-30)
}

/// Runs `$body` on f64, on the CPU in bf16, and twice on the GPU.
macro_rules! compare {
    ($rig:ident, $body:block) => {
        compare!($rig, gpu(), $body)
    };
    ($rig:ident, $cuda:expr, $body:block) => {{
        let Some(cuda) = $cuda else { return };
        let seed = std::env::var("OOMB_TEST_SEED").map_or_else(
            |_| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64,
            |seed| seed.parse().unwrap(),
        );
        eprintln!("OOMB_TEST_SEED={seed}");
        fn run<B: Backend>(mut rig: Rig<B>) -> Vec<Output> {
            let $rig = &mut rig;
            $body
            rig.outputs
        }
        let cpu = |real, compute_dtype| Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
        let exact = run(Rig::new(cpu(Real::F64, DType::F32), true, seed));
        let reference = run(Rig::new(cpu(Real::F32, DType::Bf16), false, seed));
        let got = run(Rig::new(cuda.clone(), false, seed));
        let again = run(Rig::new(cuda, false, seed));
        let mut failures = Vec::new();
        for (((exact, reference), got), again) in exact.iter().zip(&reference).zip(&got).zip(&again) {
            let (error, allowed) = (distance(&got.values, &exact.values), 2.0 * distance(&reference.values, &exact.values) + got.floor);
            let same = got.values.iter().zip(&again.values).all(|(a, b)| a.to_bits() == b.to_bits());
            println!("{:40} {error:9.2e} allowed {allowed:9.2e}{}", got.name, if same { "" } else { " NOT THE SAME BITS TWICE" });
            // A NaN is within no bound.
            let within = error <= allowed;
            if !same || !within {
                failures.push(got.name.clone());
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
        assert_eq!((exact.len(), reference.len()), (got.len(), again.len()));
    }};
}

#[test]
fn norm() {
    compare!(rig, {
        for (t, d) in [(1, 8), (3, 20), (17, 3584), (1000, 896), (5, 37)] {
            let (x, weight, dy) = (rig.activation(&[t, d]), rig.activation(&[d]), rig.activation(&[t, d]));
            let (mut y, mut rstd) = (rig.void(rig.act, &[t, d]), rig.void(DType::F32, &[t]));
            rig.device.rmsnorm_forward(&mut y, &mut rstd, &x, &weight, 1e-6);
            rig.keep(format!("norm y {t} {d}"), &y, F32_FLOOR);
            rig.keep(format!("norm rstd {t} {d}"), &rstd, F32_FLOOR);
            let (mut dx, mut dweight) = (rig.activation(&[t, d]), rig.float(DType::F32, &[d]));
            rig.device.rmsnorm_backward(&mut dx, Some(&mut dweight), &dy, &x, &rstd, &weight);
            rig.keep(format!("norm dx {t} {d}"), &dx, F32_FLOOR);
            rig.keep(format!("norm dweight {t} {d}"), &dweight, F32_FLOOR);
        }
    });
}

#[test]
fn linear() {
    compare!(rig, {
        for (t, n, k) in [(1, 8, 16), (7, 37, 20), (130, 512, 896), (64, 152, 64), (3, 40, 24)] {
            let (x, w, dy) = (rig.activation(&[t, k]), rig.activation(&[n, k]), rig.activation(&[t, n]));
            let (bias, residual) = (rig.activation(&[n]), rig.activation(&[t, n]));
            for (name, epilogue) in
                [("", Epilogue::None), ("bias", Epilogue::Bias(&bias)), ("residual", Epilogue::Residual(&residual))]
            {
                let mut y = rig.void(rig.act, &[t, n]);
                rig.device.linear_forward(&mut y, &x, &w, epilogue);
                rig.keep(format!("linear y {name} {t} {n} {k}"), &y, F32_FLOOR);
            }
            let mut in_place = residual.clone();
            rig.device.linear_forward(&mut in_place, &x, &w, Epilogue::Residual(&residual));
            rig.keep(format!("linear y in place {t} {n} {k}"), &in_place, F32_FLOOR);
            for write in [Write::Overwrite, Write::Accumulate] {
                let mut dx = rig.activation(&[t, k]);
                rig.device.linear_backward_input(&mut dx, &dy, &w, write);
                rig.keep(format!("linear dx {write:?} {t} {n} {k}"), &dx, F32_FLOOR);
            }
            let (mut dw, mut dbias) = (rig.float(DType::F32, &[n, k]), rig.float(DType::F32, &[n]));
            rig.device.linear_backward_weight(&mut dw, &dy, &x, Write::Accumulate);
            rig.keep(format!("linear dw {t} {n} {k}"), &dw, F32_FLOOR);
            let mut dw = rig.void(DType::F32, &[n, k]);
            rig.device.linear_backward_weight(&mut dw, &dy, &x, Write::Overwrite);
            rig.keep(format!("linear dw over {t} {n} {k}"), &dw, F32_FLOOR);
            rig.device.linear_backward_bias(&mut dbias, &dy);
            rig.keep(format!("linear dbias {t} {n} {k}"), &dbias, F32_FLOOR);
        }
    });
}

/// Adapters of rank k on some columns of a fused projection: first, middle, last, all; ranks and widths down to odd ones.
#[test]
fn linear_columns() {
    compare!(rig, {
        for (t, width, range, k) in [
            (1, 8, 0..4, 8),
            (130, 1152, 896..1024, 16),
            (1000, 4608, 3584..4096, 64),
            (64, 512, 256..512, 8),
            (7, 37, 5..20, 3),
            (17, 24, 0..24, 1),
        ] {
            let columns = Columns { range: range.clone(), scale: 0.7 };
            let (x, w) = (rig.activation(&[t, k]), rig.activation(&[range.len(), k]));
            let (mut y, dy) = (rig.activation(&[t, width]), rig.activation(&[t, width]));
            rig.device.linear_columns_forward(&mut y, &x, &w, &columns);
            rig.keep(format!("columns y {t} {range:?} {k}"), &y, F32_FLOOR);
            let (mut dx, mut dw) = (rig.void(rig.act, &[t, k]), rig.float(DType::F32, &[range.len(), k]));
            rig.device.linear_columns_backward(&mut dx, &mut dw, &dy, &x, &w, &columns);
            rig.keep(format!("columns dx {t} {range:?} {k}"), &dx, F32_FLOOR);
            rig.keep(format!("columns dw {t} {range:?} {k}"), &dw, F32_FLOOR);
        }
    });
}

/// Norms whose weights are frozen: the gradients of what they normed, and no others.
#[test]
fn frozen_norms() {
    compare!(rig, {
        let (t, d) = (17, 64);
        let (x, weight, dy, rstd) =
            (rig.activation(&[t, d]), rig.activation(&[d]), rig.activation(&[t, d]), rig.float(DType::F32, &[t]));
        let mut dx = rig.activation(&[t, d]);
        rig.device.rmsnorm_backward(&mut dx, None, &dy, &x, &rstd, &weight);
        rig.keep("frozen norm dx", &dx, F32_FLOOR);
        let (mut qkv, dq, table) =
            (rig.activation(&[t, 4 * d]), rig.float(DType::F32, &[t, 2, d]), rig.float(DType::F32, &[t, d / 2, 2]));
        let grads = rig.float(DType::F32, &[1, 2, 1, 64, d]);
        let pages = Pages { slab: &grads, refs: &[PageRef { slot: 0, index: 0 }] };
        let norm = QkNorm { q_weight: &weight, k_weight: &weight, eps: 1e-6 };
        rig.device.qkv_backward(&mut qkv, &dq, pages, Some((norm, None)), &table);
        rig.keep("frozen norm dqkv", &qkv, F32_FLOOR);
    });
}

#[test]
fn rope_and_pages() {
    compare!(rig, {
        for (t, h, g, dim, page, normed) in
            [(1, 3, 1, 64, 64, true), (200, 28, 4, 128, 128, false), (130, 8, 1, 128, 64, true), (9, 4, 2, 6, 4, true)]
        {
            let inv_freq: Vec<f64> = (0..dim / 2).map(|i| 1e6f64.powf(-2.0 * i as f64 / dim as f64)).collect();
            let inv_freq = tensor_from(&rig.device, DType::F64, &[dim / 2], HostData::F64(&inv_freq)).unwrap();
            let positions: Vec<u32> = (0..t as u32).map(|i| 4_194_304 - i * 977).collect();
            let (positions, mut table) = (rig.integers(&positions), rig.void(DType::F32, &[t, dim / 2, 2]));
            rig.device.rope_table(&mut table, &positions, &inv_freq, 1.1);
            rig.keep(format!("rope table {t} {dim}"), &table, F32_FLOOR);

            let width = (h + 2 * g) * dim;
            let (mut qkv, q_weight, k_weight) = (rig.activation(&[t, width]), rig.activation(&[dim]), rig.activation(&[dim]));
            let num_pages = t.div_ceil(page);
            let refs: Vec<PageRef> =
                (0..num_pages).map(|i| PageRef { slot: (num_pages - i) as u32, index: 5 + i as u32 }).collect();
            let slab = rig.activation(&[num_pages + 2, 2, g, page, dim]);
            let norm = || normed.then_some(QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: 1e-6 });
            let mut q = rig.void(rig.act, &[t, h, dim]);
            rig.device.qkv_forward(&mut q, Some(Pages { slab: &slab, refs: &refs }), 0, &qkv, norm(), &table);
            rig.keep(format!("q {t} {h} {dim}"), &q, F32_FLOOR);
            rig.keep(format!("pages {t} {g} {dim}"), &slab, F32_FLOOR);
            for dtype in [DType::F32, DType::Bf16] {
                let (dq, grads) = (rig.float(DType::F32, &[t, h, dim]), rig.float(dtype, &[num_pages + 2, 2, g, page, dim]));
                let (mut dq_weight, mut dk_weight) = (rig.float(DType::F32, &[dim]), rig.float(DType::F32, &[dim]));
                let pages = Pages { slab: &grads, refs: &refs };
                let gradient = QkNormGrad { dq_weight: &mut dq_weight, dk_weight: &mut dk_weight };
                rig.device.qkv_backward(&mut qkv, &dq, pages, norm().map(|norm| (norm, Some(gradient))), &table);
                rig.keep(format!("dqkv {dtype:?} {t} {h} {dim}"), &qkv, F32_FLOOR);
                rig.keep(format!("dq weight {t} {h} {dim}"), &dq_weight, F32_FLOOR);
                rig.keep(format!("dk weight {t} {h} {dim}"), &dk_weight, F32_FLOOR);
                qkv = rig.activation(&[t, width]);
            }
        }
    });
}

#[test]
fn mlp_embed_and_loss() {
    compare!(rig, {
        for (t, f) in [(1, 8), (33, 4864), (7, 37)] {
            let (mut gate_up, mut dy, mut y) = (rig.activation(&[t, 2 * f]), rig.activation(&[t, f]), rig.void(rig.act, &[t, f]));
            rig.device.swiglu_forward(&mut y, &gate_up);
            rig.keep(format!("swiglu {t} {f}"), &y, F32_FLOOR);
            rig.device.swiglu_backward(&mut gate_up, &mut dy);
            rig.keep(format!("swiglu gradient {t} {f}"), &gate_up, F32_FLOOR);
            rig.keep(format!("swiglu again {t} {f}"), &dy, F32_FLOOR);
        }
        for (t, v, d) in [(1, 5, 8), (700, 11, 64), (300, 5000, 37)] {
            let (table, ids, dx) = (rig.activation(&[v, d]), rig.ids(t, v), rig.activation(&[t, d]));
            let (mut x, mut dtable) = (rig.void(rig.act, &[t, d]), rig.float(DType::F32, &[v, d]));
            rig.device.embed_forward(&mut x, &table, &ids);
            rig.keep(format!("embed {t} {v}"), &x, F32_FLOOR);
            rig.device.embed_backward(&mut dtable, &dx, &ids);
            rig.keep(format!("embed gradient {t} {v}"), &dtable, F32_FLOOR);
        }
        for (t, v) in [(1, 8), (40, 37), (9, 49_152), (3, 152_064)] {
            let mut labels: Vec<u32> = (0..t).map(|_| rig.below(v) as u32).collect();
            labels[t / 2] = if t > 1 { IGNORE } else { labels[0] };
            let (mut logits, labels) = (rig.activation(&[t, v]), rig.integers(&labels));
            let mut loss = rig.void(DType::F32, &[t]);
            rig.device.cross_entropy_forward(&mut loss, &logits, &labels);
            rig.keep(format!("loss {t} {v}"), &loss, F32_FLOOR);
            rig.device.cross_entropy_backward(&mut loss, &mut logits, &labels, 0.37);
            rig.keep(format!("loss again {t} {v}"), &loss, F32_FLOOR);
            rig.keep(format!("logits' gradient {t} {v}"), &logits, F32_FLOOR);
        }
    });
}

#[test]
fn optimizer() {
    compare!(rig, {
        for len in [1, 5, 4096, 100_003] {
            let x = rig.float(DType::F32, &[len]);
            let mut sum = tensor_from(&rig.device, DType::F64, &[1], HostData::F64(&[0.5])).unwrap();
            rig.device.sum_squares(&mut sum, &x);
            rig.keep(format!("sum of squares {len}"), &sum, F32_FLOOR);
            let narrow = rig.activation(&[len]);
            rig.device.sum_squares(&mut sum, &narrow);
            rig.keep(format!("sum of squares of activations {len}"), &sum, F32_FLOOR);
            for clip in [false, true] {
                let (mut w, mut master) = (rig.activation(&[len]), rig.void(DType::F32, &[len]));
                rig.device.copy(&mut master, &w);
                let (mut m, mut v) = (rig.float(DType::F32, &[len]), rig.float(DType::F32, &[len]));
                rig.device.copy(&mut v, &x);
                let mut positive = rig.void(DType::F32, &[len]);
                rig.device.fill(&mut positive, 0.3);
                let grad = rig.float(DType::F32, &[len]);
                let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 7 };
                let [m_state, v_state] = [&mut m, &mut positive].map(|values| Moment { values, scales: None });
                let random = RandomBits::default();
                let state = AdamWState { master: Some(&mut master), m: m_state, v: v_state, random };
                let clip = clip.then_some(Clip { norm_squared: &sum, max_norm: 0.4 });
                rig.device.adamw(&mut w, state, &grad, hyper, clip);
                rig.keep(format!("adamw weight {len}"), &w, F32_FLOOR);
                rig.keep(format!("adamw master {len}"), &master, F32_FLOOR);
                rig.keep(format!("adamw m {len}"), &m, F32_FLOOR);
                rig.keep(format!("adamw v {len}"), &positive, F32_FLOOR);
            }
            let mut normal = rig.void(DType::F32, &[len]);
            rig.device.fill_normal(&mut normal, 0.02, 77);
            rig.keep(format!("normal {len}"), &normal, F32_FLOOR);
        }
    });
}

/// Two updates with moments that are rounded stochastically, with a master and without. The GPU draws the CPU's random bits, so
/// that only what lies within a rounding of f32 from a draw falls the other way: an element in a hundred thousand, by an eighth at
/// most.
#[test]
fn optimizer_states() {
    compare!(rig, {
        for (dtype, with_master) in [(DType::Bf16, true), (DType::Bf16, false), (DType::U8, true), (DType::U8, false)] {
            for len in [1, 255, 4096, 100_003] {
                let name = format!("{dtype:?} {len}{}", if with_master { " with master" } else { "" });
                let mut w = rig.activation(&[len]);
                let mut master = rig.void(DType::F32, &[len]);
                rig.device.copy(&mut master, &w);
                let mut moments = [(); 2].map(|()| new_tensor(&rig.device, dtype, &[len]).unwrap());
                moments.iter_mut().for_each(|moment| rig.device.fill(moment, 0.0));
                let mut scales = [(); 2].map(|()| rig.void(DType::F32, &[len.div_ceil(BLOCK_ELEMENTS)]));
                scales.iter_mut().for_each(|scales| rig.device.fill(scales, 1.0));
                for step in 1..=2 {
                    let grad = rig.float(DType::F32, &[len]);
                    let hyper = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
                    let [m, v] = &mut moments;
                    let [m_scales, v_scales] = scales.each_mut().map(|scales| (dtype == DType::U8).then_some(scales));
                    let (m, v) = (Moment { values: m, scales: m_scales }, Moment { values: v, scales: v_scales });
                    let random = RandomBits { seed: 77 + u64::from(step), first: 1 << 33 };
                    let state = AdamWState { master: with_master.then_some(&mut master), m, v, random };
                    rig.device.adamw(&mut w, state, &grad, hyper, None);
                }
                rig.keep(format!("adamw weight {name}"), &w, F32_FLOOR);
                rig.keep(format!("adamw master {name}"), &master, ROUNDING_FLOOR);
                for ((moment, scales), format) in moments.iter().zip(&scales).zip([SmallFloat::Signed, SmallFloat::Unsigned]) {
                    let name = format!("adamw {format:?} {name}");
                    if dtype == DType::Bf16 {
                        rig.keep(name, moment, ROUNDING_FLOOR);
                        continue;
                    }
                    let scales = rig.device.download_f32(scales).unwrap();
                    let codes = rig.device.download_u8(moment).unwrap();
                    let value = |(i, &code): (usize, &u8)| f64::from(format.decode(code, scales[i / BLOCK_ELEMENTS]));
                    let values = codes.iter().enumerate().map(value).collect();
                    rig.outputs.push(Output { name, values, floor: ROUNDING_FLOOR });
                }
            }
        }
    });
}

/// Every mask, list and carry, at head dims 64 and 128.
fn attend<B: Backend>(rig: &mut Rig<B>) {
    for (t, start, h, g, dim, page, window, groups) in [
        (1, 0, 1, 1, 64, 64, 1000, 1),
        (63, 128, 3, 1, 64, 128, 1000, 2),
        (129, 256, 4, 1, 128, 128, 1000, 1),
        (200, 384, 7, 1, 64, 128, 50, 3),
        (128, 512, 28, 4, 128, 128, 300, 4),
        (65, 64, 8, 8, 128, 64, 1, 1),
        (127, 0, 8, 1, 128, 128, 1000, 1),
    ] {
        let keys: usize = start + t;
        let num_pages = keys.div_ceil(page);
        let mut slots: Vec<u32> = (0..num_pages as u32 + 1).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, rig.below(i + 1));
        }
        let refs: Vec<PageRef> = (0..num_pages).map(|i| PageRef { slot: slots[i], index: i as u32 }).collect();
        let shape = [num_pages + 1, 2, g, page, dim];
        let (kv, q, d_o) = (rig.activation(&shape), rig.activation(&[t, h, dim]), rig.activation(&[t, h, dim]));
        let first: Vec<u32> = (start..keys).map(|position| (position + 1).saturating_sub(window) as u32).collect();
        let lowest = first[0] as usize / page;
        let first = rig.integers(&first);
        let mask = Mask { first: &first, start: start as u32, scale: 1.0 / (dim as f32).sqrt() };
        let (mut o, mut lse) = (rig.void(rig.act, &[t, h, dim]), rig.void(DType::F32, &[t, h]));
        let mut carry = rig.void(DType::F32, &[t, h, dim]);
        let per_group = (num_pages - lowest).div_ceil(groups);
        let parts: Vec<&[PageRef]> = refs[lowest..].chunks(per_group).collect();
        for (i, refs) in parts.iter().enumerate() {
            let part = match (i == 0, i + 1 == parts.len()) {
                (true, true) => Part::Only,
                (true, false) => Part::First,
                (false, true) => Part::Last,
                (false, false) => Part::Middle,
            };
            rig.device.attention_forward(&mut o, &mut lse, &mut carry, &q, Pages { slab: &kv, refs }, mask, part);
        }
        let name = format!("{t}+{start} {h}/{g} {dim}");
        rig.keep(format!("attention o {name}"), &o, F32_FLOOR);
        rig.keep(format!("attention lse {name}"), &lse, 1e-5);
        let mut delta = rig.void(DType::F32, &[t, h]);
        rig.device.attention_delta(&mut delta, &o, &d_o);
        rig.keep(format!("attention delta {name}"), &delta, TENSOR_CORE_FLOOR);
        let (mut dq, dkv) = (rig.float(DType::F32, &[t, h, dim]), rig.float(DType::F32, &shape));
        for refs in &parts {
            let (kv, dkv) = (Pages { slab: &kv, refs }, Pages { slab: &dkv, refs });
            let args = AttentionBackward { q: &q, kv, d_o: &d_o, lse: &lse, delta: &delta, mask, seed: 3 };
            rig.device.attention_backward(&mut dq, dkv, args);
        }
        rig.keep(format!("attention dq {name}"), &dq, TENSOR_CORE_FLOOR);
        rig.keep(format!("attention dkv {name}"), &dkv, TENSOR_CORE_FLOOR);
    }
}

#[test]
fn attention() {
    compare!(rig, gpu(), { attend(rig) });
}

/// The kernels for every GPU, also where the GPU has its own.
#[test]
fn portable_attention() {
    compare!(rig, gpu().map(|cuda| cuda.with_portable_attention()), { attend(rig) });
}

#[test]
fn copies_and_events() {
    let Some(cuda) = gpu() else { return };
    let n = 1 << 20;
    let (mut a, b) = (new_tensor(&cuda, DType::F32, &[n]).unwrap(), new_tensor(&cuda, DType::F32, &[n]).unwrap());
    let host = cuda.alloc_pinned(4 * n as u64).unwrap();
    assert_eq!((cuda.device_bytes(), cuda.pinned_bytes()), (8 * n as u64, 4 * n as u64));
    use oomb_device::ops::optim::OptimOps;
    for round in 0..20 {
        cuda.fill(&mut a, round as f32);
        let written = cuda.record(Stream::Compute);
        cuda.wait(Stream::Out, &written);
        cuda.copy_out(&host, 0, a.buffer(), 0, 4 * n as u64);
        let saved = cuda.record(Stream::Out);
        cuda.wait(Stream::In, &saved);
        cuda.copy_in(b.buffer(), 0, &host, 0, 4 * n as u64);
        let loaded = cuda.record(Stream::In);
        cuda.wait(Stream::Compute, &loaded);
        assert!(cuda.download_f32(&b).unwrap().iter().all(|&x| x == round as f32), "round {round}");
    }
    // Larger than the two upload buffers together, and of an odd length.
    let long: Vec<f32> = (0..12_000_001).map(|i| i as f32).collect();
    let tensor = tensor_from(&cuda, DType::F32, &[long.len()], HostData::F32(&long)).unwrap();
    assert!(cuda.download_f32(&tensor).unwrap() == long);
    cuda.synchronize().unwrap();
}

/// Offsets beyond 2^31 elements: the far end of a large tensor is computed as a small one is.
#[test]
fn more_than_two_to_the_31_elements() {
    let Some(cuda) = gpu() else { return };
    let (_, free) = cuda.memory();
    if free < 20 << 30 {
        eprintln!("skipped: 20 GiB of device memory wanted, {} free", free);
        return;
    }
    let mut rig = Rig::new(cuda.clone(), false, 5);
    let (d, rows) = (4096, (1usize << 31) / 4096 + 3);
    let (small, weight) = (rig.activation(&[3, d]), rig.activation(&[d]));
    let x = new_tensor(&cuda, DType::Bf16, &[rows, d]).unwrap();
    cuda.copy(&mut x.narrow(rows - 3..rows), &small);
    let (mut y, mut rstd) = (new_tensor(&cuda, DType::Bf16, &[rows, d]).unwrap(), rig.void(DType::F32, &[rows]));
    let (mut small_y, mut small_rstd) = (rig.void(DType::Bf16, &[3, d]), rig.void(DType::F32, &[3]));
    use oomb_device::ops::norm::NormOps;
    use oomb_device::ops::optim::OptimOps;
    cuda.rmsnorm_forward(&mut y, &mut rstd, &x, &weight, 1e-6);
    cuda.rmsnorm_forward(&mut small_y, &mut small_rstd, &small, &weight, 1e-6);
    assert_eq!(cuda.download_f32(&y.narrow(rows - 3..rows)).unwrap(), cuda.download_f32(&small_y).unwrap());

    use oomb_device::ops::mlp::MlpOps;
    let gate_up = y.narrow(0..rows / 2 * 2).reshape(&[rows / 2, 2 * d]);
    let half = gate_up.rows();
    let mut act = x.narrow(0..half);
    cuda.fill(&mut act, f32::NAN);
    cuda.swiglu_forward(&mut act, &gate_up);
    let mut last = rig.void(DType::Bf16, &[1, d]);
    cuda.swiglu_forward(&mut last, &gate_up.narrow(half - 1..half));
    assert_eq!(cuda.download_f32(&act.narrow(half - 1..half)).unwrap(), cuda.download_f32(&last).unwrap());

    // Pages in slots beyond 2^31 elements.
    let (page, dim, g) = (128, 128, 4);
    let slots = rows * d / (2 * g * page * dim);
    let slab = y.narrow(0..slots * 2 * g * page * dim / d).reshape(&[slots, 2, g, page, dim]);
    let kv = rig.activation(&[2, 2, g, page, dim]);
    cuda.copy(&mut slab.narrow(slots - 2..slots), &kv);
    let q = rig.activation(&[200, 28, dim]);
    let first = rig.integers(&[0; 200]);
    let mask = Mask { first: &first, start: 56, scale: 0.1 };
    use oomb_device::ops::attention::AttentionOps;
    let run = |slab: &Tensor<Cuda>, base: u32| {
        let refs = [PageRef { slot: base, index: 0 }, PageRef { slot: base + 1, index: 1 }];
        let (mut o, mut lse) = (rig.void(DType::Bf16, &[200, 28, dim]), rig.void(DType::F32, &[200, 28]));
        let mut carry = rig.void(DType::F32, &[200, 28, dim]);
        cuda.attention_forward(&mut o, &mut lse, &mut carry, &q, Pages { slab, refs: &refs }, mask, Part::Only);
        cuda.download_f32(&o).unwrap()
    };
    assert_eq!(run(&slab, slots as u32 - 2), run(&kv, 0));
}
