//! Every op family at ragged sizes, its inputs made from a seed. It must not know what another backend computes.

use super::Kind;
use super::attention::{self, AttentionSizes, Sees};
use super::moments;
use super::rig::{Output, Outputs, Random, Rig};
use oomb_device::ops::attention::{PageRef, Pages};
use oomb_device::ops::linear::{Columns, Epilogue, Write};
use oomb_device::ops::loss::IGNORE;
use oomb_device::ops::optim::{AdamW, AdamWState, Clip, Moment, RandomBits};
use oomb_device::ops::rope::{QkNorm, QkNormGrad};
use oomb_device::{Backend, DType, Result};

/// Ops of one family at one size. Widths are multiples of 8, as those of every published model are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// RMS norm of `[rows, width]`.
    Norm {
        /// T.
        rows: usize,
        /// D.
        width: usize,
    },
    /// Products of `[rows, k]` and `[n, k]`.
    Linear {
        /// T.
        rows: usize,
        /// N.
        n: usize,
        /// K.
        k: usize,
    },
    /// SwiGLU of `[rows, 2·width]`.
    Mlp {
        /// T.
        rows: usize,
        /// F.
        width: usize,
    },
    /// Rows of `[vocabulary, width]`.
    Embed {
        /// T.
        rows: usize,
        /// V.
        vocabulary: usize,
        /// D.
        width: usize,
    },
    /// Cross entropy of `[rows, vocabulary]`.
    Loss {
        /// Tokens of the tile.
        rows: usize,
        /// V.
        vocabulary: usize,
    },
    /// The rotation's table up to position 4,194,304, and projections through it, with and without QK norm.
    Rope {
        /// T.
        rows: usize,
        /// H.
        heads: usize,
        /// G.
        kv_heads: usize,
        /// Dh.
        head_dim: usize,
    },
    /// Filling, copying, the norm and AdamW on so many elements.
    Optim {
        /// Elements.
        len: usize,
    },
    /// Attention.
    Attention(AttentionSizes),
}

/// Page length of the cases: that of training.
pub(super) const PAGE: usize = 128;

/// What `oomb doctor` runs: every op, ragged sizes, head widths 64 and 128, 1 to 8 query heads on a key head.
pub fn cases() -> Vec<Case> {
    let attention = |queries, start, (ratio, head_dim), sees| {
        Case::Attention(AttentionSizes { queries, start, kv_heads: if ratio > 4 { 1 } else { 2 }, ratio, head_dim, sees })
    };
    vec![
        Case::Norm { rows: 37, width: 192 },
        Case::Norm { rows: 5, width: 3584 },
        Case::Linear { rows: 1, n: 64, k: 128 },
        Case::Linear { rows: 37, n: 72, k: 192 },
        Case::Linear { rows: 133, n: 320, k: 96 },
        Case::Mlp { rows: 37, width: 328 },
        Case::Embed { rows: 133, vocabulary: 50, width: 192 },
        Case::Loss { rows: 37, vocabulary: 1000 },
        Case::Loss { rows: 3, vocabulary: 50_264 },
        Case::Rope { rows: 150, heads: 4, kv_heads: 2, head_dim: 64 },
        Case::Rope { rows: 129, heads: 7, kv_heads: 1, head_dim: 128 },
        Case::Optim { len: 5003 },
        attention(1, 0, (1, 64), Sees::All),
        attention(37, 0, (3, 64), Sees::All),
        attention(130, 250, (4, 64), Sees::Window(70)),
        attention(37, 0, (1, 128), Sees::All),
        attention(100, 333, (7, 128), Sees::All),
        attention(64, 128, (8, 128), Sees::Documents(100)),
        attention(200, 384, (4, 128), Sees::Window(150)),
    ]
}

impl Case {
    /// In words.
    pub fn size(&self) -> String {
        match self {
            Self::Norm { rows, width } | Self::Mlp { rows, width } => format!("{rows} x {width}"),
            Self::Linear { rows, n, k } => format!("{rows} x {n} x {k}"),
            Self::Embed { rows, vocabulary, width } => format!("{rows} of {vocabulary} x {width}"),
            Self::Loss { rows, vocabulary } => format!("{rows} x {vocabulary}"),
            Self::Rope { rows, heads, kv_heads, head_dim } => format!("{rows}, heads {heads} on {kv_heads} x {head_dim}"),
            Self::Optim { len } => format!("{len}"),
            Self::Attention(sizes) => sizes.words(),
        }
    }

    pub(super) fn run<B: Backend>(&self, rig: &Rig<'_, B>) -> Result<Vec<Output>> {
        match *self {
            Self::Norm { rows, width } => norm(rig, rows, width),
            Self::Linear { rows, n, k } => linear(rig, rows, n, k),
            Self::Mlp { rows, width } => mlp(rig, rows, width),
            Self::Embed { rows, vocabulary, width } => embed(rig, rows, vocabulary, width),
            Self::Loss { rows, vocabulary } => loss(rig, rows, vocabulary),
            Self::Rope { rows, heads, kv_heads, head_dim } => rope(rig, rows, (heads, kv_heads), head_dim),
            Self::Optim { len } => optim(rig, len),
            Self::Attention(sizes) => attention::run(rig, sizes),
        }
    }
}

fn norm<B: Backend>(rig: &Rig<'_, B>, rows: usize, width: usize) -> Result<Vec<Output>> {
    const EPS: f32 = 1e-5;
    let (mut random, shape) = (Random::new(1), [rows, width]);
    let (x, dy, weight) = (random.values(rows * width), random.values(rows * width), random.values(width));
    let rstd = |row: &[f64]| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(EPS)).sqrt();
    let exact_rstd: Vec<f64> = x.chunks_exact(width).map(rstd).collect();
    let (dx_before, dweight_before) = (random.values(rows * width), random.values(width));
    let (x, dy, weight) = (rig.activation(&shape, &x)?, rig.activation(&shape, &dy)?, rig.activation(&[width], &weight)?);
    let (mut y, mut rstd) = (rig.void(rig.act, &shape)?, rig.void(DType::F32, &[rows])?);
    rig.device.rmsnorm_forward(&mut y, &mut rstd, &x, &weight, EPS);
    let (mut dx, mut dweight) = (rig.activation(&shape, &dx_before)?, rig.f32(&[width], &dweight_before)?);
    rig.device.rmsnorm_backward(&mut dx, Some(&mut dweight), &dy, &x, &rig.f32(&[rows], &exact_rstd)?, &weight);
    let mut out = Outputs::new(rig);
    out.of("rmsnorm_forward").add("y", &y)?.add("rstd", &rstd)?;
    out.of("rmsnorm_backward").add("dx", &dx)?.added("dweight", Kind::Stored, &dweight, &dweight_before)?;
    Ok(out.list)
}

fn linear<B: Backend>(rig: &Rig<'_, B>, rows: usize, n: usize, k: usize) -> Result<Vec<Output>> {
    let mut random = Random::new(2);
    let x = rig.activation(&[rows, k], &random.values(rows * k))?;
    let w = rig.activation(&[n, k], &random.values(n * k))?;
    let dy = rig.activation(&[rows, n], &random.values(rows * n))?;
    let (bias, residual) = (random.values(n), random.values(rows * n));
    let (bias, residual) = (rig.activation(&[n], &bias)?, rig.activation(&[rows, n], &residual)?);
    let mut out = Outputs::new(rig);
    out.of("linear_forward");
    for (name, epilogue) in
        [("y", Epilogue::None), ("y + bias", Epilogue::Bias(&bias)), ("y + residual", Epilogue::Residual(&residual))]
    {
        let mut y = rig.void(rig.act, &[rows, n])?;
        rig.device.linear_forward(&mut y, &x, &w, epilogue);
        out.add(name, &y)?;
    }
    // The residual stream's own form: the output holds the residual.
    let mut y = residual.clone();
    rig.device.linear_forward(&mut y, &x, &w, Epilogue::Residual(&residual));
    out.add("y in place", &y)?;
    let mut dx = rig.void(rig.act, &[rows, k])?;
    rig.device.linear_backward_input(&mut dx, &dy, &w, Write::Overwrite);
    out.of("linear_backward_input").add("dx", &dx)?;
    let mut dx = rig.activation(&[rows, k], &random.values(rows * k))?;
    rig.device.linear_backward_input(&mut dx, &dy, &w, Write::Accumulate);
    out.add("dx accumulated", &dx)?;
    let (dw_before, dbias_before) = (random.values(n * k), random.values(n));
    let (mut dw, mut dbias) = (rig.f32(&[n, k], &dw_before)?, rig.f32(&[n], &dbias_before)?);
    rig.device.linear_backward_weight(&mut dw, &dy, &x, Write::Accumulate);
    out.of("linear_backward_weight").added("dw", Kind::Stored, &dw, &dw_before)?;
    let mut dw = rig.void(DType::F32, &[n, k])?;
    rig.device.linear_backward_weight(&mut dw, &dy, &x, Write::Overwrite);
    out.add("dw overwritten", &dw)?;
    rig.device.linear_backward_bias(&mut dbias, &dy);
    // A quarter of the columns, as an adapter of one projection in a fused matrix has.
    let columns = Columns { range: n / 4..n / 2, scale: 0.5 };
    let part = rig.activation(&[n / 2 - n / 4, k], &random.values((n / 2 - n / 4) * k))?;
    let mut y = rig.activation(&[rows, n], &random.values(rows * n))?;
    rig.device.linear_columns_forward(&mut y, &x, &part, &columns);
    let (mut dx, mut dpart) = (rig.void(rig.act, &[rows, k])?, rig.f32(part.shape(), &dw_before[..part.len()])?);
    rig.device.linear_columns_backward(&mut dx, &mut dpart, &dy, &x, &part, &columns);
    out.of("linear_columns_forward").add("y", &y)?.of("linear_columns_backward").add("dx", &dx)?;
    out.added("dw", Kind::Stored, &dpart, &dw_before[..part.len()])?;
    out.of("linear_backward_bias").added("dbias", Kind::Stored, &dbias, &dbias_before)?;
    Ok(out.list)
}

fn mlp<B: Backend>(rig: &Rig<'_, B>, rows: usize, width: usize) -> Result<Vec<Output>> {
    let mut random = Random::new(3);
    let mut gate_up = rig.activation(&[rows, 2 * width], &random.scaled(2 * rows * width, 4.0))?;
    let mut dy = rig.activation(&[rows, width], &random.values(rows * width))?;
    let mut y = rig.void(rig.act, &[rows, width])?;
    rig.device.swiglu_forward(&mut y, &gate_up);
    rig.device.swiglu_backward(&mut gate_up, &mut dy);
    let mut out = Outputs::new(rig);
    out.of("swiglu_forward").add("y", &y)?.of("swiglu_backward").add("gate, up", &gate_up)?.add("y", &dy)?;
    Ok(out.list)
}

fn embed<B: Backend>(rig: &Rig<'_, B>, rows: usize, vocabulary: usize, width: usize) -> Result<Vec<Output>> {
    let mut random = Random::new(4);
    let table = rig.activation(&[vocabulary, width], &random.values(vocabulary * width))?;
    let ids = rig.ids(&random.ids(rows, vocabulary as u32))?;
    let dx = rig.activation(&[rows, width], &random.values(rows * width))?;
    let before = random.values(vocabulary * width);
    let (mut x, mut dtable) = (rig.void(rig.act, &[rows, width])?, rig.f32(&[vocabulary, width], &before)?);
    rig.device.embed_forward(&mut x, &table, &ids);
    rig.device.embed_backward(&mut dtable, &dx, &ids);
    let mut out = Outputs::new(rig);
    out.of("embed_forward").add("x", &x)?;
    out.of("embed_backward").added("dtable", Kind::Stored, &dtable, &before)?;
    Ok(out.list)
}

fn loss<B: Backend>(rig: &Rig<'_, B>, rows: usize, vocabulary: usize) -> Result<Vec<Output>> {
    let mut random = Random::new(5);
    let mut logits = rig.activation(&[rows, vocabulary], &random.scaled(rows * vocabulary, 16.0))?;
    let mut labels = random.ids(rows, vocabulary as u32);
    labels[rows / 2] = IGNORE;
    let labels = rig.ids(&labels)?;
    let (mut forward, mut backward) = (rig.void(DType::F32, &[rows])?, rig.void(DType::F32, &[rows])?);
    rig.device.cross_entropy_forward(&mut forward, &logits, &labels);
    rig.device.cross_entropy_backward(&mut backward, &mut logits, &labels, 1.0 / rows as f32);
    let mut out = Outputs::new(rig);
    out.of("cross_entropy_forward").add("loss", &forward)?;
    out.of("cross_entropy_backward").add("loss", &backward)?.add("dlogits", &logits)?;
    Ok(out.list)
}

fn optim<B: Backend>(rig: &Rig<'_, B>, len: usize) -> Result<Vec<Output>> {
    let mut random = Random::new(6);
    let mut out = Outputs::new(rig);
    let (values, shape) = (random.values(len), [len]);
    let mut filled = rig.void(rig.act, &shape)?;
    rig.device.fill(&mut filled, 0.625);
    out.of("fill").add("x", &filled)?;
    let (source, mut target) = (rig.activation(&shape, &values)?, rig.void(DType::F32, &shape)?);
    rig.device.copy(&mut target, &source);
    out.of("copy").add("to f32", &target)?;
    rig.device.copy(&mut filled, &target);
    out.add("to activations", &filled)?;
    rig.device.fill_normal(&mut filled, 0.02, 11);
    rig.device.fill_normal(&mut target, 1.0, 12);
    out.of("fill_normal").add("activations", &filled)?.add("f32", &target)?;

    let (grad, m, v) = (random.values(len), random.values(len), random.values(len));
    let v: Vec<f64> = v.into_iter().map(f64::abs).collect();
    let (grad, mut m, mut v) = (rig.f32(&shape, &grad)?, rig.f32(&shape, &m)?, rig.f32(&shape, &v)?);
    let mut norm_squared = rig.tensor(DType::F64, &[1], &[0.5])?;
    rig.device.sum_squares(&mut norm_squared, &grad);
    out.of("sum_squares").add("out", &norm_squared)?;
    // A device that stores bf16 weights has f32 masters; one that does not, has the weights themselves.
    let mut w = rig.activation(&shape, &values)?;
    let mut master = if rig.act == DType::Bf16 { Some(rig.f32(&shape, &values)?) } else { None };
    let hyper = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
    let clip = rig.tensor(DType::F64, &[1], &[4.0])?;
    let [m_state, v_state] = [&mut m, &mut v].map(|values| Moment { values, scales: None });
    let state = AdamWState { master: master.as_mut(), m: m_state, v: v_state, random: RandomBits::default() };
    rig.device.adamw(&mut w, state, &grad, hyper, Some(Clip { norm_squared: &clip, max_norm: 1.0 }));
    out.of("adamw").add("w", &w)?.add("master", master.as_ref().unwrap_or(&w))?.add("m", &m)?.add("v", &v)?;
    let mut list = out.list;
    list.extend(moments::run(rig, len)?);
    Ok(list)
}

fn rope<B: Backend>(rig: &Rig<'_, B>, rows: usize, (heads, kv_heads): (usize, usize), head_dim: usize) -> Result<Vec<Output>> {
    let (mut random, half) = (Random::new(7), head_dim / 2);
    // The last positions of a sequence of 4M tokens, where f32 angles would be noise.
    let positions: Vec<u32> = (0..rows as u32).map(|t| if t < 5 { t } else { 4_194_304 - t }).collect();
    let inv_freq: Vec<f64> = (0..half).map(|d| 1e6f64.powf(-(d as f64) / half as f64)).collect();
    let angles = positions.iter().flat_map(|&position| inv_freq.iter().map(move |freq| f64::from(position) * freq));
    let exact: Vec<f64> = angles.flat_map(|angle| [angle.cos(), angle.sin()]).collect();
    let mut table = rig.void(DType::F32, &[rows, half, 2])?;
    rig.device.rope_table(&mut table, &rig.ids(&positions)?, &rig.tensor(DType::F64, &[half], &inv_freq)?, 1.0);
    let mut out = Outputs::new(rig);
    out.of("rope_table").add("cos, sin", &table)?;
    let table = rig.f32(&[rows, half, 2], &exact)?;

    let (width, q_shape) = ((heads + 2 * kv_heads) * head_dim, [rows, heads, head_dim]);
    let qkv_values = random.values(rows * width);
    let pages = rows.div_ceil(PAGE);
    let slab_shape = [pages + 2, 2, kv_heads, PAGE, head_dim];
    // Rows that are not written must be left as they are, so the slab is compared whole.
    let slab_before = random.values(slab_shape.iter().product());
    let refs: Vec<_> = random.slots(pages, pages + 2).into_iter().zip(0..).map(|(slot, index)| PageRef { slot, index }).collect();
    let weights = [random.values(head_dim), random.values(head_dim)];
    let (q_weight, k_weight) = (rig.activation(&[head_dim], &weights[0])?, rig.activation(&[head_dim], &weights[1])?);
    let dq = rig.f32(&q_shape, &random.values(rows * heads * head_dim))?;
    let norm = || QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: 1e-6 };
    for (forward, backward, normed) in
        [("qkv_forward", "qkv_backward", false), ("qkv_forward, normed", "qkv_backward, normed", true)]
    {
        let mut qkv = rig.activation(&[rows, width], &qkv_values)?;
        let (mut q, slab) = (rig.void(rig.act, &q_shape)?, rig.activation(&slab_shape, &slab_before)?);
        rig.device.qkv_forward(&mut q, Some(Pages { slab: &slab, refs: &refs }), 0, &qkv, normed.then(norm), &table);
        out.of(forward).add("q", &q)?.add("pages", &slab)?;
        let grads = rig.f32(&slab_shape, &slab_before)?;
        let (mut dq_weight, mut dk_weight) = (rig.f32(&[head_dim], &weights[1])?, rig.f32(&[head_dim], &weights[0])?);
        let norm_grad = QkNormGrad { dq_weight: &mut dq_weight, dk_weight: &mut dk_weight };
        let both = normed.then(|| (norm(), Some(norm_grad)));
        rig.device.qkv_backward(&mut qkv, &dq, Pages { slab: &grads, refs: &refs }, both, &table);
        out.of(backward).add("dqkv", &qkv)?;
        if normed {
            out.added("dq_weight", Kind::Stored, &dq_weight, &weights[1])?;
            out.added("dk_weight", Kind::Stored, &dk_weight, &weights[0])?;
        }
    }
    Ok(out.list)
}
