//! The [`Device`] contract on the GPU: allocation, copies, uploads and downloads.
//!
//! It must not know ops. Copies between the tiers read and write pinned memory; uploads pass through two pinned buffers in turn, so
//! that the caller's memory is free at once and gigabytes stream.

use super::buffer::{Buffer, Event, HostBuffer};
use super::driver::{self, DriverError, DriverResult, Handle};
use super::{Cuda, WORKSPACE_BYTES, lock};
use crate::{DType, Device, Error, HostData, Result, Stream, Tensor};
use half::bf16;

/// Bytes of one of the two upload buffers.
const STAGE_BYTES: usize = 16 << 20;

/// Two pinned buffers for uploads and downloads.
pub(super) struct Staging {
    buffers: [Handle<*mut u8>; 2],
    busy: [Option<Event>; 2],
    next: usize,
}

impl Staging {
    pub(super) fn new() -> DriverResult<Self> {
        let buffer = || driver::allocate_host(STAGE_BYTES as u64);
        Ok(Self { buffers: [buffer()?, buffer()?], busy: [None, None], next: 0 })
    }

    pub(super) fn free(&mut self) {
        self.busy = [None, None];
        for buffer in self.buffers {
            let _ = driver::free_host(buffer);
        }
    }
}

fn failed(op: &str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Failed { op: op.to_owned(), detail: error.to_string() }
}

impl Device for Cuda {
    type Buffer = Buffer;
    type HostBuffer = HostBuffer;
    type Event = Event;

    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn hardware(&self) -> String {
        self.model_name()
    }

    fn element_bytes(&self, dtype: DType) -> usize {
        match dtype {
            DType::U8 => 1,
            DType::Bf16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 => 8,
        }
    }

    fn compute_dtype(&self) -> DType {
        DType::Bf16
    }

    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        Buffer::new(bytes, &self.shared.context, &self.shared.device_ledger)
    }

    fn alloc_pinned(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::new(bytes, &self.shared.context, &self.shared.pinned_ledger)
    }

    fn device_bytes(&self) -> u64 {
        self.shared.device_ledger.bytes()
    }

    fn pinned_bytes(&self) -> u64 {
        self.shared.pinned_ledger.bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        WORKSPACE_BYTES
    }

    fn memory(&self) -> (u64, u64) {
        let asked = self.shared.context.enter().and_then(|()| driver::memory_info());
        asked.map_or((0, 0), |(free, total)| (total, free))
    }

    fn record(&self, stream: Stream) -> Event {
        let mut event = Event::failed();
        self.attempt("record an event", || {
            let taken = self.shared.events.take().map_err(failed("make an event"))?;
            if let Some(handle) = taken.handle() {
                driver::record_event(handle, self.stream(stream)).map_err(failed("record an event"))?;
            }
            event = taken;
            Ok(())
        });
        event
    }

    fn wait(&self, stream: Stream, event: &Event) {
        let Some(handle) = event.handle() else { return };
        self.attempt("wait for an event", || {
            driver::wait_event(self.stream(stream), handle).map_err(failed("wait for an event"))
        });
    }

    fn copy_in(&self, dst: &Buffer, dst_offset: u64, src: &HostBuffer, src_offset: u64, bytes: u64) {
        assert!(
            dst_offset + bytes <= dst.bytes() && src_offset + bytes <= src.bytes(),
            "copy_in of {bytes} bytes leaves a buffer"
        );
        self.attempt("copy_in", || {
            // SAFETY: both runs lie in their buffers; the contract's events keep others away until the copy is done.
            unsafe {
                let from = src.pointer().add(src_offset as usize);
                driver::copy_host_to_device(dst.address() + dst_offset, from, bytes, self.stream(Stream::In))
            }
            .map_err(failed("copy_in"))
        });
    }

    fn copy_out(&self, dst: &HostBuffer, dst_offset: u64, src: &Buffer, src_offset: u64, bytes: u64) {
        assert!(
            dst_offset + bytes <= dst.bytes() && src_offset + bytes <= src.bytes(),
            "copy_out of {bytes} bytes leaves a buffer"
        );
        self.attempt("copy_out", || {
            // SAFETY: as in copy_in.
            unsafe {
                let to = dst.pointer().add(dst_offset as usize);
                driver::copy_device_to_host(to, src.address() + src_offset, bytes, self.stream(Stream::Out))
            }
            .map_err(failed("copy_out"))
        });
    }

    fn upload(&self, dst: &mut Tensor<Self>, src: HostData<'_>) {
        assert_eq!(dst.len(), src.len(), "upload into {dst:?}");
        let same_kind = match src {
            HostData::U32(_) => dst.dtype() == DType::U32,
            HostData::U8(_) => dst.dtype() == DType::U8,
            _ => dst.dtype().is_float(),
        };
        assert!(same_kind, "upload into {dst:?}: integers and floats, or integers of two kinds");
        let piece = STAGE_BYTES / dst.element_bytes();
        let mut staging = lock(&self.shared.staging);
        for start in (0..src.len()).step_by(piece) {
            let end = src.len().min(start + piece);
            let half = staging.next;
            staging.next = 1 - half;
            let busy = staging.busy[half].take();
            let buffer = staging.buffers[half];
            let bytes = (end - start) * dst.element_bytes();
            self.attempt("upload", || {
                busy.map_or(Ok(()), |event| event.synchronize())?;
                // SAFETY: the buffer has STAGE_BYTES and no copy reads it any more.
                let stage = unsafe { std::slice::from_raw_parts_mut(buffer.0, bytes) };
                convert(stage, dst.dtype(), src, start..end);
                let to = self.pointer(dst) + (start * dst.element_bytes()) as u64;
                // SAFETY: the run lies in the tensor; the buffer is not touched before the event recorded below.
                unsafe { driver::copy_host_to_device(to, buffer.0, bytes as u64, self.stream(Stream::Compute)) }
                    .map_err(failed("upload"))
            });
            staging.busy[half] = Some(self.record(Stream::Compute));
        }
    }

    fn download_f32(&self, src: &Tensor<Self>) -> Result<Vec<f32>> {
        let bytes = self.download(src)?;
        Ok(match src.dtype() {
            DType::Bf16 => bytemuck::pod_collect_to_vec::<u8, bf16>(&bytes).iter().map(|x| x.to_f32()).collect(),
            DType::F32 => bytemuck::pod_collect_to_vec(&bytes),
            DType::F64 => bytemuck::pod_collect_to_vec::<u8, f64>(&bytes).iter().map(|&x| x as f32).collect(),
            DType::U32 | DType::U8 => panic!("download_f32 of {src:?}"),
        })
    }

    fn download_f64(&self, src: &Tensor<Self>) -> Result<Vec<f64>> {
        if src.dtype() == DType::F64 {
            return Ok(bytemuck::pod_collect_to_vec(&self.download(src)?));
        }
        Ok(self.download_f32(src)?.into_iter().map(f64::from).collect())
    }

    fn download_u32(&self, src: &Tensor<Self>) -> Result<Vec<u32>> {
        assert_eq!(src.dtype(), DType::U32, "download_u32 of {src:?}");
        Ok(bytemuck::pod_collect_to_vec(&self.download(src)?))
    }

    fn download_u8(&self, src: &Tensor<Self>) -> Result<Vec<u8>> {
        assert_eq!(src.dtype(), DType::U8, "download_u8 of {src:?}");
        self.download(src)
    }

    fn synchronize(&self) -> Result<()> {
        for stream in [Stream::Compute, Stream::In, Stream::Out] {
            self.finish(stream)?;
        }
        Ok(())
    }
}

impl Cuda {
    /// Waits for a stream, and reports the first failure since the last report.
    fn finish(&self, stream: Stream) -> Result<()> {
        self.attempt("wait for the device", || {
            driver::synchronize_stream(self.stream(stream)).map_err(failed("an op enqueued before"))
        });
        self.failure().take().map_or(Ok(()), Err)
    }

    fn download(&self, src: &Tensor<Self>) -> Result<Vec<u8>> {
        self.finish(Stream::Compute)?;
        let mut bytes = vec![0u8; src.bytes() as usize];
        let staging = lock(&self.shared.staging);
        let (stage, address) = (staging.buffers[0], self.pointer(src));
        if let Some(event) = &staging.busy[0] {
            event.synchronize()?;
        }
        for (index, piece) in bytes.chunks_mut(STAGE_BYTES).enumerate() {
            let from = address + (index * STAGE_BYTES) as u64;
            // SAFETY: the run lies in the tensor and the pinned buffer; the copy is waited for before the buffer is read.
            unsafe { driver::copy_device_to_host(stage.0, from, piece.len() as u64, self.stream(Stream::Compute)) }
                .map_err(failed("download"))?;
            self.finish(Stream::Compute)?;
            // SAFETY: as above; the buffer holds at least this piece.
            piece.copy_from_slice(unsafe { std::slice::from_raw_parts(stage.0, piece.len()) });
        }
        Ok(bytes)
    }
}

/// Writes elements of `src` as `dtype`.
fn convert(stage: &mut [u8], dtype: DType, src: HostData<'_>, range: std::ops::Range<usize>) {
    // Pinned memory is page aligned.
    match (dtype, src) {
        (DType::U32, HostData::U32(src)) => stage.copy_from_slice(bytemuck::cast_slice(&src[range])),
        (DType::U8, HostData::U8(src)) => stage.copy_from_slice(&src[range]),
        (DType::Bf16, HostData::Bf16(src)) => stage.copy_from_slice(bytemuck::cast_slice(&src[range])),
        (DType::F32, HostData::F32(src)) => stage.copy_from_slice(bytemuck::cast_slice(&src[range])),
        (DType::Bf16, _) => fill(bytemuck::cast_slice_mut(stage), src, range, bf16::from_f64),
        (DType::F32, _) => fill(bytemuck::cast_slice_mut(stage), src, range, |x| x as f32),
        (DType::F64, _) => fill(bytemuck::cast_slice_mut(stage), src, range, |x| x),
        (DType::U32 | DType::U8, _) => unreachable!("checked by upload"),
    }
}

fn fill<T>(stage: &mut [T], src: HostData<'_>, range: std::ops::Range<usize>, convert: impl Fn(f64) -> T) {
    let place = stage.iter_mut();
    match src {
        HostData::F32(src) => place.zip(&src[range]).for_each(|(to, &x)| *to = convert(f64::from(x))),
        HostData::F64(src) => place.zip(&src[range]).for_each(|(to, &x)| *to = convert(x)),
        HostData::Bf16(src) => place.zip(&src[range]).for_each(|(to, x)| *to = convert(x.to_f64())),
        HostData::F16(src) => place.zip(&src[range]).for_each(|(to, x)| *to = convert(x.to_f64())),
        HostData::U32(_) | HostData::U8(_) => unreachable!("checked by upload"),
    }
}
