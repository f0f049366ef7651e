//! Attention of one chunk over pages on the CPU: GFLOP/s of the work that the mask leaves visible.
//!
//! `cargo bench -p oomb-device --bench attention`; `RAYON_NUM_THREADS=1` for one core. The second number of a pair is per
//! second that a core was busy with it (Linux), which other processes hardly disturb. Forward counts 4·Dh FLOP per visible
//! pair of query and key and per head, backward 10·Dh (five products).
//!
//! Expected: `gemm` multiplies tiles of this size at 125 to 160 GFLOP/s on one core of a 2-core Xeon with AVX-512 (2026-12-01).
//! The softmax between costs a sixth of a forward tile and a tenth of a backward one, which leaves 110 to 130 a core.

#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use oomb_device::cpu::Cpu;
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::attention::{AttentionBackward, AttentionOps, Mask, PageRef, Pages, Part};
use oomb_device::{DType, Device, HostData, Tensor};
use std::time::Instant;

/// P.
const PAGE: usize = 128;
const REPEATS: usize = 5;

struct Sizes {
    t: usize,
    /// Keys, the chunk's own included.
    keys: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

fn main() {
    println!(
        "{:>6} {:>7} {:>3} {:>3} {:>4} {:>25} {:>25}",
        "T", "keys", "H", "G", "Dh", "forward GFLOP/s, per core", "backward GFLOP/s, per core"
    );
    for (t, keys, heads, kv_heads, head_dim) in [
        (2048, 16 * 1024, 2, 1, 64),
        (2048, 32 * 1024, 4, 2, 32),
        (2048, 2048, 4, 2, 32),
        (512, 16 * 1024, 2, 1, 64),
        (2048, 16 * 1024, 7, 1, 128),
    ] {
        run(&Sizes { t, keys, heads, kv_heads, head_dim });
    }
}

fn run(sizes: &Sizes) {
    let &Sizes { t, keys, heads, kv_heads, head_dim } = sizes;
    let cpu = Cpu::default();
    let act = cpu.compute_dtype();
    let filled = |dtype, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37).sin()).collect();
        tensor_from(&cpu, dtype, shape, HostData::F32(&values)).unwrap()
    };
    let num_pages = keys.div_ceil(PAGE);
    let slab_shape = [num_pages, 2, kv_heads, PAGE, head_dim];
    let shape = [t, heads, head_dim];
    let (kv, dkv) = (filled(act, &slab_shape), filled(DType::F32, &slab_shape));
    let (q, d_o, mut dq) = (filled(act, &shape), filled(act, &shape), filled(DType::F32, &shape));
    let new = |dtype, shape: &[usize]| new_tensor(&cpu, dtype, shape).unwrap();
    let (mut o, mut carry) = (new(act, &shape), new(DType::F32, &shape));
    let (mut lse, mut delta) = (new(DType::F32, &shape[..2]), new(DType::F32, &shape[..2]));
    let first: Tensor<Cpu> = tensor_from(&cpu, DType::U32, &[t], HostData::U32(&vec![0; t])).unwrap();
    let start = keys - t;
    let mask = Mask { first: &first, start: start as u32, scale: 1.0 / (head_dim as f32).sqrt() };
    let refs: Vec<PageRef> = (0..num_pages as u32).map(|index| PageRef { slot: index, index }).collect();

    let forward = best_seconds(&cpu, || {
        let pages = Pages { slab: &kv, refs: &refs };
        cpu.attention_forward(&mut o, &mut lse, &mut carry, &q, pages, mask, Part::Only);
    });
    cpu.attention_delta(&mut delta, &o, &d_o);
    let backward = best_seconds(&cpu, || {
        let pages = Pages { slab: &kv, refs: &refs };
        let args = AttentionBackward { q: &q, kv: pages, d_o: &d_o, lse: &lse, delta: &delta, mask, seed: 0 };
        cpu.attention_backward(&mut dq, Pages { slab: &dkv, refs: &refs }, args);
    });
    let visible: usize = (0..t).map(|t| start + t + 1).sum();
    let product = 2.0 * (visible * heads * head_dim) as f64 / 1e9;
    let rates = |flop: f64, (seconds, busy): (f64, f64)| format!("{:.0}, {:.0}", flop / seconds, flop / busy);
    println!(
        "{t:>6} {keys:>7} {heads:>3} {kv_heads:>3} {head_dim:>4} {:>25} {:>25}",
        rates(2.0 * product, forward),
        rates(5.0 * product, backward)
    );
}

/// The best of several, since other processes can only slow it down: seconds by the clock, and by the cores that worked.
fn best_seconds(cpu: &Cpu, mut call: impl FnMut()) -> (f64, f64) {
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..=REPEATS {
        let (start, busy) = (Instant::now(), busy_seconds());
        call();
        cpu.synchronize().unwrap();
        best = (best.0.min(start.elapsed().as_secs_f64()), best.1.min(busy_seconds() - busy));
    }
    best
}

/// Seconds that cores have spent in this process's threads; not a number where the system does not say.
fn busy_seconds() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return f64::NAN };
    let of_thread = |path: std::path::PathBuf| -> Option<f64> {
        let nanoseconds: f64 = std::fs::read_to_string(path.join("schedstat")).ok()?.split(' ').next()?.parse().ok()?;
        Some(nanoseconds / 1e9)
    };
    threads.filter_map(|thread| of_thread(thread.ok()?.path())).sum()
}
