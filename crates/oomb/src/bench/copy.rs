//! Copies between host and device, in pieces of several sizes, and within the device. It must not know what is copied.

use super::{Bench, Ceilings, Row, Work};
use oomb_device::{Backend, DType, Result};

/// Copies of `total_bytes` in pieces of each of `pieces` bytes: in, out, and both at once; then one within the device.
///
/// # Errors
/// Of the device, memory included.
///
/// # Panics
/// If a piece is empty.
pub fn run<B: Backend>(bench: &Bench<B>, total_bytes: u64, pieces: &[u64]) -> Result<Vec<Row>> {
    let device = &bench.device;
    let ceilings = Ceilings::of(&device.hardware());
    let (arriving, leaving) = (device.alloc(total_bytes)?, device.alloc(total_bytes)?);
    let (source, target) = (device.alloc_pinned(total_bytes)?, device.alloc_pinned(total_bytes)?);
    let copy_in = |offset, bytes| device.copy_in(&arriving, offset, &source, offset, bytes);
    let copy_out = |offset, bytes| device.copy_out(&target, offset, &leaving, offset, bytes);
    let mut rows = Vec::new();
    for &piece in pieces {
        assert!(piece > 0, "a piece has bytes");
        let offsets = || (0..total_bytes).step_by(piece as usize).map(|offset| (offset, piece.min(total_bytes - offset)));
        let mut row = |direction, timing, factor: u64, ceiling| {
            let size = crate::config::Bytes(piece).to_string();
            let work = Work::Bytes((factor * total_bytes) as f64);
            rows.push(Row { name: "copy", size, direction, timing, work, ceiling });
        };
        let timing = bench.time(|| offsets().for_each(|(offset, bytes)| copy_in(offset, bytes)))?;
        row("in", timing, 1, ceilings.map(|ceilings| ceilings.copy_in));
        let timing = bench.time(|| offsets().for_each(|(offset, bytes)| copy_out(offset, bytes)))?;
        row("out", timing, 1, ceilings.map(|ceilings| ceilings.copy_out));
        let timing = bench.time(|| {
            for (offset, bytes) in offsets() {
                copy_in(offset, bytes);
                copy_out(offset, bytes);
            }
        })?;
        row("both", timing, 2, ceilings.map(|ceilings| ceilings.copy_both));
    }
    rows.push(within(bench, total_bytes)?);
    Ok(rows)
}

/// A copy within the device; each byte counts as read and as written.
fn within<B: Backend>(bench: &Bench<B>, total_bytes: u64) -> Result<Row> {
    let device = &bench.device;
    let dtype = device.compute_dtype();
    let elements = (total_bytes as usize / device.element_bytes(dtype)).max(1);
    let (mut dst, src) = (bench.activation(&[elements], 1)?, bench.activation(&[elements], 2)?);
    let timing = bench.time(|| device.copy(&mut dst, &src))?;
    let name = if dtype == DType::F32 { "copy of f32" } else { "copy of bf16" };
    Ok(Row {
        name,
        size: crate::config::Bytes(src.bytes()).to_string(),
        direction: "within the device",
        timing,
        work: Work::Bytes(2.0 * src.bytes() as f64),
        ceiling: Ceilings::of(&device.hardware()).map(|ceilings| ceilings.device_copy),
    })
}
