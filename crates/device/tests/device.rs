//! The CPU device's contract: order within a stream, none between streams but by events, memory and failures.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use oomb_device::cpu::{Cpu, CpuOptions, Delays, Poison, Real};
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::embed::EmbedOps;
use oomb_device::ops::norm::NormOps;
use oomb_device::ops::optim::OptimOps;
use oomb_device::{DType, Device, Error, HostData, Stream, Tensor};
use std::time::{Duration, Instant};

const ELEMENTS: usize = 1000;
const BYTES: u64 = 4 * ELEMENTS as u64;

fn delayed(compute_ms: u64, copy_in_ms: u64, copy_out_ms: u64, seed: u64) -> Cpu {
    let [compute, copy_in, copy_out] = [compute_ms, copy_in_ms, copy_out_ms].map(Duration::from_millis);
    Cpu::new(CpuOptions { delays: Some(Delays { compute, copy_in, copy_out, seed }), ..CpuOptions::default() })
}

fn filled(cpu: &Cpu, value: f32) -> Tensor<Cpu> {
    let mut x = new_tensor(cpu, DType::F32, &[ELEMENTS]).unwrap();
    cpu.fill(&mut x, value);
    x
}

#[derive(Clone, Copy, PartialEq)]
enum Events {
    All,
    /// The copy in does not wait for the copy out that fills its source.
    NoDataReady,
    /// The last reader does not wait for the copy in.
    NoArrival,
    /// The slot is overwritten without waiting for its reader.
    NoSlotFree,
}

/// A page's way out and back: written, copied to the host, copied into a slot that an op has just read, read again.
/// Returns what was read from the slot first and last.
fn round_trip(cpu: &Cpu, events: Events) -> (Vec<f32>, Vec<f32>) {
    let host = cpu.alloc_pinned(BYTES).unwrap();
    let mut page = filled(cpu, 1.0);
    let slot = filled(cpu, 2.0);
    let mut read = [filled(cpu, 0.0), filled(cpu, 0.0)];
    cpu.synchronize().unwrap();

    cpu.fill(&mut page, 3.0);
    let written = cpu.record(Stream::Compute);
    cpu.wait(Stream::Out, &written);
    cpu.copy_out(&host, 0, page.buffer(), page.offset_bytes(), BYTES);
    let on_host = cpu.record(Stream::Out);
    cpu.copy(&mut read[0], &slot);
    let slot_free = cpu.record(Stream::Compute);
    if events != Events::NoDataReady {
        cpu.wait(Stream::In, &on_host);
    }
    if events != Events::NoSlotFree {
        cpu.wait(Stream::In, &slot_free);
    }
    cpu.copy_in(slot.buffer(), slot.offset_bytes(), &host, 0, BYTES);
    let arrived = cpu.record(Stream::In);
    if events != Events::NoArrival {
        cpu.wait(Stream::Compute, &arrived);
    }
    cpu.copy(&mut read[1], &slot);
    let result = (cpu.download_f32(&read[0]).unwrap(), cpu.download_f32(&read[1]).unwrap());
    cpu.synchronize().unwrap();
    result
}

fn all(value: f32) -> Vec<f32> {
    vec![value; ELEMENTS]
}

#[test]
fn events_order_streams_under_any_delay() {
    for seed in 0..20 {
        for (compute, copy_in, copy_out) in [(3, 0, 0), (0, 3, 0), (0, 0, 3), (2, 2, 2)] {
            let cpu = delayed(compute, copy_in, copy_out, seed);
            assert_eq!(round_trip(&cpu, Events::All), (all(2.0), all(3.0)), "seed {seed}");
        }
    }
}

#[test]
fn a_missing_event_gives_wrong_numbers() {
    // With up to 100 ms in one stream and none in the others, the race is lost by any sleep of more than a scheduler's
    // whim; the seed makes the sleeps the same each time.
    let (read, again) = round_trip(&delayed(0, 0, 100, 1), Events::NoDataReady);
    assert_eq!((read, again), (all(2.0), all(0.0)), "the host's old bytes went in");
    let (read, again) = round_trip(&delayed(0, 100, 0, 1), Events::NoArrival);
    assert_eq!((read, again), (all(2.0), all(2.0)), "the slot was read before the page arrived");
    let (read, again) = round_trip(&delayed(100, 0, 0, 1), Events::NoSlotFree);
    assert_eq!((read, again), (all(3.0), all(3.0)), "the slot was overwritten before it was read");
}

#[test]
fn enqueueing_does_not_wait() {
    let cpu = delayed(200, 200, 200, 1);
    let (host, mut x) = (cpu.alloc_pinned(BYTES).unwrap(), new_tensor(&cpu, DType::F32, &[ELEMENTS]).unwrap());
    let start = Instant::now();
    for _ in 0..4 {
        cpu.fill(&mut x, 1.0);
        cpu.upload(&mut x, HostData::F32(&[2.0; ELEMENTS]));
        cpu.wait(Stream::In, &cpu.record(Stream::Compute));
        cpu.copy_in(x.buffer(), 0, &host, 0, BYTES);
        cpu.copy_out(&host, 0, x.buffer(), 0, BYTES);
    }
    let enqueued = start.elapsed();
    cpu.synchronize().unwrap();
    let finished = start.elapsed();
    assert!(enqueued * 4 < finished, "enqueued in {enqueued:?}, finished in {finished:?}");
}

#[test]
fn a_download_does_not_wait_for_copies() {
    let cpu = delayed(0, 2000, 0, 1);
    let (host, x, other) = (cpu.alloc_pinned(BYTES).unwrap(), filled(&cpu, 1.0), filled(&cpu, 0.0));
    let start = Instant::now();
    cpu.copy_in(other.buffer(), 0, &host, 0, BYTES);
    cpu.download_f32(&x).unwrap();
    let downloaded = start.elapsed();
    cpu.synchronize().unwrap();
    assert!(downloaded * 2 < start.elapsed(), "downloaded in {downloaded:?}");
}

#[test]
fn copies_take_byte_offsets() {
    let cpu = Cpu::default();
    let values: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let x = tensor_from(&cpu, DType::F32, &[8], HostData::F32(&values)).unwrap();
    let (host, y) = (cpu.alloc_pinned(16).unwrap(), tensor_from(&cpu, DType::F32, &[4], HostData::F32(&[9.0; 4])).unwrap());
    cpu.synchronize().unwrap();
    cpu.copy_out(&host, 4, x.buffer(), 20, 8);
    cpu.synchronize().unwrap();
    cpu.copy_in(y.buffer(), 8, &host, 4, 8);
    cpu.synchronize().unwrap();
    assert_eq!(cpu.download_f32(&y).unwrap(), [9.0, 9.0, 5.0, 6.0]);
    assert_eq!(cpu.download_f32(&x.reshape(&[2, 4]).index(1)).unwrap(), [4.0, 5.0, 6.0, 7.0]);
}

#[test]
fn poisoned_memory_is_nan() {
    let cpu = Cpu::new(CpuOptions { poison: Poison::On, ..CpuOptions::default() });
    assert!(cpu.download_f32(&new_tensor(&cpu, DType::F32, &[17]).unwrap()).unwrap().iter().all(|x| x.is_nan()));
    assert_eq!(cpu.download_u32(&new_tensor(&cpu, DType::U32, &[2]).unwrap()).unwrap(), [u32::MAX; 2]);
    let (host, x) = (cpu.alloc_pinned(8).unwrap(), tensor_from(&cpu, DType::F32, &[2], HostData::F32(&[1.0; 2])).unwrap());
    cpu.synchronize().unwrap();
    cpu.copy_in(x.buffer(), 0, &host, 0, 8);
    cpu.synchronize().unwrap();
    assert!(cpu.download_f32(&x).unwrap().iter().all(|x| x.is_nan()), "pinned memory too");
}

#[test]
fn memory_is_counted_and_limited() {
    let cpu = Cpu::new(CpuOptions { memory_bytes: Some(1000), ..CpuOptions::default() });
    let first = cpu.alloc(600).unwrap();
    let _pinned = cpu.alloc_pinned(5000).unwrap();
    assert_eq!((cpu.device_bytes(), cpu.pinned_bytes(), cpu.memory()), (600, 5000, (1000, 400)));
    let Err(error) = cpu.alloc(401) else { panic!("the limit is 1000") };
    let message = "out of device memory: asked for 401 bytes, 600 already allocated here: the device is limited to 1000 bytes";
    assert_eq!(error.to_string(), message);
    assert!(matches!(cpu.alloc_pinned(u64::MAX - 10), Err(Error::OutOfMemory { tier: "pinned host", .. })));
    let second = cpu.alloc(400).unwrap();
    drop(first);
    assert_eq!(cpu.device_bytes(), 400);
    drop((second, cpu.alloc(0).unwrap()));
    assert_eq!((cpu.device_bytes(), cpu.pinned_bytes()), (0, 5000));
}

#[test]
fn elements_take_the_real_type() {
    let bytes = |real| {
        let cpu = Cpu::new(CpuOptions { real, ..CpuOptions::default() });
        [DType::Bf16, DType::F32, DType::F64, DType::U32].map(|dtype| cpu.element_bytes(dtype))
    };
    assert_eq!((bytes(Real::F32), bytes(Real::F64)), ([4, 4, 8, 4], [8, 8, 8, 4]));
}

#[test]
fn a_failure_skips_what_follows_and_is_reported_once() {
    let cpu = Cpu::default();
    let table = filled(&cpu, 1.0).reshape(&[100, 10]);
    let mut rows = tensor_from(&cpu, DType::F32, &[2, 10], HostData::F32(&[5.0; 20])).unwrap();
    let ids = tensor_from(&cpu, DType::U32, &[2], HostData::U32(&[3, 100])).unwrap();
    cpu.embed_forward(&mut rows, &table, &ids);
    cpu.fill(&mut rows, 7.0);
    let error = cpu.synchronize().unwrap_err();
    let message = "the device failed while running embed_forward: token 1 has id 100, outside the vocabulary of 100";
    assert_eq!(error.to_string(), message);
    cpu.synchronize().unwrap();
    assert_eq!(cpu.download_f32(&rows).unwrap(), [5.0; 20], "skipped, both");
    cpu.fill(&mut rows, 7.0);
    assert_eq!(cpu.download_f32(&rows).unwrap(), [7.0; 20], "works again");
    cpu.embed_forward(&mut rows, &table, &ids);
    assert!(matches!(cpu.download_f32(&rows), Err(Error::Failed { op, .. }) if op == "embed_forward"));
}

#[test]
fn dropping_the_last_handle_finishes_the_work() {
    let cpu = delayed(5, 5, 5, 3);
    let (host, mut x) = (cpu.alloc_pinned(BYTES).unwrap(), filled(&cpu, 1.0));
    cpu.fill(&mut x, 2.0);
    cpu.wait(Stream::Out, &cpu.record(Stream::Compute));
    cpu.copy_out(&host, 0, x.buffer(), 0, BYTES);
    let again = cpu.clone();
    std::thread::spawn(move || drop(again)).join().unwrap();
    drop(cpu);
    // The buffers outlive the device; another device reads them.
    let reader = Cpu::default();
    let y = filled(&reader, 0.0);
    reader.synchronize().unwrap();
    reader.copy_in(y.buffer(), 0, &host, 0, BYTES);
    reader.synchronize().unwrap();
    assert_eq!(reader.download_f32(&y).unwrap(), all(2.0));
}

#[test]
#[should_panic(expected = "rmsnorm_forward: weight is F32[9], wanted Activation[10]")]
fn a_wrong_shape_panics_in_the_caller() {
    let cpu = Cpu::default();
    let x = filled(&cpu, 1.0).reshape(&[100, 10]);
    let (mut y, mut rstd) = (x.clone(), filled(&cpu, 0.0).narrow(0..100));
    cpu.rmsnorm_forward(&mut y, &mut rstd, &x, &filled(&cpu, 1.0).narrow(0..9), 1e-6);
}

#[test]
#[should_panic(expected = "rmsnorm_forward: y overlaps x")]
fn an_output_onto_an_input_panics_in_the_caller() {
    let cpu = Cpu::default();
    let x = filled(&cpu, 1.0).reshape(&[100, 10]);
    let (mut y, mut rstd) = (x.clone(), filled(&cpu, 0.0).narrow(0..100));
    cpu.rmsnorm_forward(&mut y, &mut rstd, &x, &filled(&cpu, 1.0).narrow(0..10), 1e-6);
}
