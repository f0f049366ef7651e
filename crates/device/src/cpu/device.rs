//! The [`Device`] contract on the CPU: allocation, copies, uploads and downloads.
//!
//! It must not know ops.

use super::buffer::{Element, Ledger, Request, View, ViewMut};
use super::real::{Float, Rounding};
use super::{Buffer, Cpu, Event, HostBuffer, Poison, Real, with_real};
use crate::ops::optim::OptimOps;
use crate::{DType, Device, Error, HostData, Result, Stream, Tensor};
use std::sync::{Arc, mpsc};

impl Device for Cpu {
    type Buffer = Buffer;
    type HostBuffer = HostBuffer;
    type Event = Event;

    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn element_bytes(&self, dtype: DType) -> usize {
        match (dtype, self.options().real) {
            (DType::U8, _) => 1,
            (DType::U32, _) | (DType::Bf16 | DType::F32, Real::F32) => 4,
            (DType::F64, _) | (DType::Bf16 | DType::F32, Real::F64) => 8,
        }
    }

    fn compute_dtype(&self) -> DType {
        self.options().compute_dtype
    }

    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        Buffer::new(&self.request("device", bytes, self.options().memory_bytes, &self.shared.device_memory))
    }

    fn alloc_pinned(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::new(&self.request("pinned host", bytes, None, &self.shared.pinned_memory))
    }

    fn device_bytes(&self) -> u64 {
        self.shared.device_memory.bytes()
    }

    fn pinned_bytes(&self) -> u64 {
        self.shared.pinned_memory.bytes()
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn memory(&self) -> (u64, u64) {
        match self.options().memory_bytes {
            Some(limit) => (limit, limit.saturating_sub(self.device_bytes())),
            None => system_memory(),
        }
    }

    fn record(&self, stream: Stream) -> Event {
        self.shared.streams.record(stream)
    }

    fn wait(&self, stream: Stream, event: &Event) {
        self.shared.streams.wait(stream, event);
    }

    fn copy_in(&self, dst: &Buffer, dst_offset: u64, src: &HostBuffer, src_offset: u64, bytes: u64) {
        let (dst, src) = (dst.span(dst_offset, bytes), src.span(src_offset, bytes));
        self.shared.streams.enqueue(Stream::In, "copy_in", move || dst.copy_from(&src));
    }

    fn copy_out(&self, dst: &HostBuffer, dst_offset: u64, src: &Buffer, src_offset: u64, bytes: u64) {
        let (dst, src) = (dst.span(dst_offset, bytes), src.span(src_offset, bytes));
        self.shared.streams.enqueue(Stream::Out, "copy_out", move || dst.copy_from(&src));
    }

    fn upload(&self, dst: &mut Tensor<Self>, src: HostData<'_>) {
        assert_eq!(dst.len(), src.len(), "upload: {} elements into {dst:?}", src.len());
        match src {
            HostData::U32(src) => self.upload_integers(dst, src.to_vec()),
            HostData::U8(src) => self.upload_integers(dst, src.to_vec()),
            HostData::F32(src) => self.upload_floats(dst, src.to_vec(), f64::from),
            HostData::F64(src) => self.upload_floats(dst, src.to_vec(), |x| x),
            HostData::Bf16(src) => self.upload_floats(dst, src.to_vec(), half::bf16::to_f64),
            HostData::F16(src) => self.upload_floats(dst, src.to_vec(), half::f16::to_f64),
        }
    }

    fn download_f32(&self, src: &Tensor<Self>) -> Result<Vec<f32>> {
        self.download_floats(src, |x| x as f32)
    }

    fn download_f64(&self, src: &Tensor<Self>) -> Result<Vec<f64>> {
        self.download_floats(src, |x| x)
    }

    fn download_u32(&self, src: &Tensor<Self>) -> Result<Vec<u32>> {
        self.fetch(View::new(src), |x: u32| x)
    }

    fn download_u8(&self, src: &Tensor<Self>) -> Result<Vec<u8>> {
        self.fetch(View::new(src), |x: u8| x)
    }

    fn poison(&self, ended: &mut Tensor<Self>) {
        if self.shared.options.poison == Poison::On {
            self.fill(ended, f32::NAN);
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.streams.finish(&[Stream::Compute, Stream::In, Stream::Out])
    }
}

impl Cpu {
    fn request<'a>(&self, tier: &'static str, bytes: u64, limit: Option<u64>, ledger: &'a Arc<Ledger>) -> Request<'a> {
        Request { tier, bytes, limit, ledger, poison: self.options().poison }
    }

    fn upload_integers<T: Element>(&self, dst: &Tensor<Self>, src: Vec<T>) {
        let mut dst = ViewMut::<T>::new(dst);
        self.shared.streams.enqueue(Stream::Compute, "upload", move || dst.slice().copy_from_slice(&src));
    }

    fn upload_floats<T: Copy + Send + 'static>(
        &self,
        dst: &Tensor<Self>,
        src: Vec<T>,
        to_f64: impl Fn(T) -> f64 + Send + 'static,
    ) {
        assert!(dst.dtype().is_float(), "upload: floats into {dst:?}");
        match dst.dtype() {
            DType::F64 => self.upload_as::<T, f64>(dst, src, to_f64),
            _ => with_real!(self, R, { self.upload_as::<T, R>(dst, src, to_f64) }),
        }
    }

    fn upload_as<T: Copy + Send + 'static, R: Float>(
        &self,
        dst: &Tensor<Self>,
        src: Vec<T>,
        to_f64: impl Fn(T) -> f64 + Send + 'static,
    ) {
        let mut dst = ViewMut::<R>::new(dst);
        self.shared.streams.enqueue(Stream::Compute, "upload", move || {
            let rounds = dst.rounding() == Rounding::Bf16;
            for (dst, &src) in dst.slice().iter_mut().zip(&src) {
                // bf16 from the f64 directly: through f32 it would be rounded twice.
                let x = to_f64(src);
                *dst = R::from_f64(if rounds { x.to_bf16() } else { x });
            }
        });
    }

    fn download_floats<U: Send + 'static>(&self, src: &Tensor<Self>, convert: fn(f64) -> U) -> Result<Vec<U>> {
        assert!(src.dtype().is_float(), "download: floats from {src:?}");
        match src.dtype() {
            DType::F64 => self.fetch(View::<f64>::new(src), convert),
            _ => with_real!(self, R, { self.fetch(View::<R>::new(src), move |x| convert(x.to_f64())) }),
        }
    }

    fn fetch<T: Element, U: Send + 'static>(&self, src: View<T>, convert: impl Fn(T) -> U + Send + 'static) -> Result<Vec<U>> {
        let (sender, receiver) = mpsc::channel();
        self.shared.streams.enqueue(Stream::Compute, "download", move || {
            let values = src.slice().iter().map(|&x| convert(x)).collect();
            // The receiver is held below until this has run.
            let _ = sender.send(values);
        });
        self.shared.streams.finish(&[Stream::Compute])?;
        receiver.recv().map_err(|_| Error::Failed {
            op: "download".to_owned(),
            detail: "skipped after a failure that was reported to another caller".to_owned(),
        })
    }
}

/// Total and available bytes as Linux states them; where it does not, no bound is known.
fn system_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    (field("MemTotal:").unwrap_or(u64::MAX), field("MemAvailable:").unwrap_or(u64::MAX))
}
