//! The products of a model's linear layers, each forward and in both backward forms. It must not know layers' order.

use super::{Bench, Ceilings, Row, Work};
use crate::model::config::ModelConfig;
use oomb_device::ops::linear::{Epilogue, Write};
use oomb_device::{Backend, DType, Result};

/// Rows of the head's products at most: the head runs in tiles of tokens, never over a chunk.
pub const HEAD_ROWS: usize = 1024;

/// One linear layer: `[rows, k]` times the transpose of `[n, k]`.
struct Linear {
    name: &'static str,
    rows: usize,
    n: usize,
    k: usize,
}

fn linears(config: &ModelConfig, tokens: usize) -> [Linear; 5] {
    let (d, f) = (config.hidden_size, config.intermediate_size);
    let linear = |name, n, k| Linear { name, rows: tokens, n, k };
    [
        linear("qkv", config.qkv_width(), d),
        linear("o", d, config.q_width()),
        linear("gate_up", 2 * f, d),
        linear("down", d, f),
        Linear { name: "head", rows: tokens.min(HEAD_ROWS), n: config.vocab_size, k: d },
    ]
}

/// Five linears, three products each; `2 · rows · n · k` FLOP per product.
///
/// # Errors
/// Of the device, memory included.
pub fn run<B: Backend>(bench: &Bench<B>, config: &ModelConfig, tokens: usize) -> Result<Vec<Row>> {
    let rows: Vec<Vec<Row>> =
        linears(config, tokens).iter().map(|linear| products(bench, config, linear)).collect::<Result<_>>()?;
    Ok(rows.into_iter().flatten().collect())
}

fn products<B: Backend>(bench: &Bench<B>, config: &ModelConfig, linear: &Linear) -> Result<Vec<Row>> {
    let (device, &Linear { name, rows, n, k }) = (&bench.device, linear);
    let x = bench.activation(&[rows, k], 1)?;
    let w = bench.normal(device.compute_dtype(), &[n, k], config.initializer_range, 2)?;
    let (mut y, dy, mut dx) =
        (bench.activation(&[rows, n], 3)?, bench.activation(&[rows, n], 4)?, bench.activation(&[rows, k], 5)?);
    let mut dw = bench.normal(DType::F32, &[n, k], 1.0, 6)?;
    let ceiling = Ceilings::of(&device.hardware()).map(|ceilings| ceilings.product);
    let work = Work::Flops(2.0 * rows as f64 * n as f64 * k as f64);
    let row = |direction, timing| Row { name, size: format!("{rows} x {n} x {k}"), direction, timing, work, ceiling };
    Ok(vec![
        row("forward", bench.time(|| device.linear_forward(&mut y, &x, &w, Epilogue::None))?),
        row("backward input", bench.time(|| device.linear_backward_input(&mut dx, &dy, &w, Write::Overwrite))?),
        row("backward weight", bench.time(|| device.linear_backward_weight(&mut dw, &dy, &x, Write::Accumulate))?),
    ])
}
