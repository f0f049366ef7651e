//! The rates that a plan predicts with, measured: products of a layer, attention by head dim, memory and the link.

use super::attention::{Case, Heads, Setup};
use super::{Bench, Row, attention, copy, gemm};
use crate::kv::select::Selection;
use crate::model::presets::preset;
use crate::plan::time::{AttentionRates, Rates};
use oomb_device::{Backend, DType, Result};
use std::collections::BTreeMap;

/// Elementwise ops reach so much of a copy's rate (H200: 3.9 of 4.26 TB/s).
const OF_A_COPY: f64 = 0.92;

/// Measures all of them; with small sizes on the CPU.
///
/// # Errors
/// Of the device, memory included.
pub fn run<B: Backend>(bench: &Bench<B>) -> Result<Rates> {
    let small = bench.device.name() == "cpu";
    let (shape, rows, square, queries, keys, total) =
        if small { ("tiny", 512, 256, 128, 1024, 64 << 20) } else { ("qwen2.5-7b", 8192, 16_384, 8192, 65_536, 1 << 30) };
    let config = preset(shape).expect("a built-in shape");
    let products = gemm::run(bench, &config, rows)?;
    let layers: Vec<&Row> = products.iter().filter(|row| row.name != "head").collect();
    let mut rates = BTreeMap::new();
    for head_dim in [64, 128] {
        let setup = Setup {
            heads: Heads { num_heads: if small { 4 } else { 28 }, num_kv_heads: if small { 2 } else { 4 }, head_dim },
            page_tokens: 128,
            group_pages: None,
            grad_dtype: DType::F32,
            seed: 0,
        };
        let case = |queries, keys| Case { queries, keys, selection: Selection::All };
        let rows = attention::run(bench, &setup, &[case(square, square), case(queries, keys)])?;
        let pair = |index: usize| [rows[index].rate(), rows[index + 1].rate()];
        rates.insert(head_dim, AttentionRates { diagonal: pair(0), past: pair(2) });
    }
    let copies = copy::run(bench, total, &[16 << 20])?;
    let rate =
        |direction: &str| copies.iter().filter(|row| row.direction == direction).map(Row::rate).fold(f64::INFINITY, f64::min);
    let within = copies.last().expect("a copy within the device").rate();
    Ok(Rates {
        products: layers.iter().map(|row| row.amount()).sum::<f64>() / layers.iter().map(|row| row.timing.median).sum::<f64>(),
        attention: rates,
        memory: OF_A_COPY * within,
        link: rate("in").min(rate("out")),
    })
}
