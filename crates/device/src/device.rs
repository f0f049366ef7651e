//! The contract of a device: memory in two tiers, three streams, events, and asynchronous copies between the tiers.
//!
//! It must not know ops. Everything enqueued runs later, in order within one stream and in no order between streams
//! except what [`Device::record`] and [`Device::wait`] impose.

use crate::{DType, Error, Result, Tensor};
use half::{bf16, f16};

/// The three queues of a device. Work in one runs in order; work in different ones overlaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// All ops, uploads and downloads.
    Compute,
    /// Copies host to device.
    In,
    /// Copies device to host.
    Out,
}

/// Values on the host, borrowed, on their way into a tensor; converted to the tensor's dtype by [`Device::upload`].
#[derive(Debug, Clone, Copy)]
pub enum HostData<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 64-bit floats.
    F64(&'a [f64]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE half precision (checkpoints only: no tensor is f16).
    F16(&'a [f16]),
    /// Token ids, positions.
    U32(&'a [u32]),
    /// Codes.
    U8(&'a [u8]),
}

impl HostData<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(s) => s.len(),
            Self::F64(s) => s.len(),
            Self::Bf16(s) => s.len(),
            Self::F16(s) => s.len(),
            Self::U32(s) => s.len(),
            Self::U8(s) => s.len(),
        }
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory, streams and events. Cloning a device or a buffer clones a handle.
///
/// # Ordering
/// A buffer carries no ordering of its own. Whoever touches the same bytes from two streams records an event after the
/// first use and waits for it before the second, in both directions (data ready, slot free). The CPU device runs each
/// stream on a thread of its own, so that a missing event is a failing test there too.
///
/// # Failure
/// Nothing here but allocation reports failure at once. What fails after it was enqueued is reported by the next
/// [`Device::synchronize`] or download, naming the op; until then later work may run on void data.
pub trait Device: Clone + Send + Sync + 'static {
    /// A run of device memory; freed when the last handle and the last enqueued use are gone.
    type Buffer: Clone + Send + Sync;
    /// A run of page-locked host memory that copies read and write asynchronously.
    type HostBuffer: Clone + Send + Sync;
    /// A point in a stream.
    type Event: Clone + Send + Sync;

    /// `"cpu"`, `"cuda:0"`: what the user would write in the configuration.
    fn name(&self) -> String;

    /// What the maker calls the hardware, `"NVIDIA H200"`; the name again where there is nothing better to say.
    fn hardware(&self) -> String {
        self.name()
    }

    /// Bytes of one element of `dtype` in a tensor here. The CPU stores every float type in its real type, so that
    /// bf16 there takes as much as f32.
    fn element_bytes(&self, dtype: DType) -> usize;

    /// The dtype in which weights, activations and KV pages are stored here: f32 on the CPU, or bf16.
    fn compute_dtype(&self) -> DType;

    /// Allocates exactly `bytes` of device memory with undefined content.
    fn alloc(&self, bytes: u64) -> Result<Self::Buffer>;

    /// Allocates exactly `bytes` of page-locked host memory with undefined content.
    fn alloc_pinned(&self, bytes: u64) -> Result<Self::HostBuffer>;

    /// Bytes now allocated through [`Self::alloc`], not counting [`Self::workspace_bytes`].
    fn device_bytes(&self) -> u64;

    /// Bytes now allocated through [`Self::alloc_pinned`].
    fn pinned_bytes(&self) -> u64;

    /// Device bytes that the backend itself took when it was made (library workspaces, reduction scratch, staging).
    fn workspace_bytes(&self) -> u64;

    /// Device memory in all, and free now (bytes).
    fn memory(&self) -> (u64, u64);

    /// Marks the point that `stream` has reached.
    fn record(&self, stream: Stream) -> Self::Event;

    /// Makes later work in `stream` wait for `event`. Does not make the host wait.
    fn wait(&self, stream: Stream, event: &Self::Event);

    /// Enqueues a copy of `bytes` host to device on [`Stream::In`]. Offsets are bytes.
    fn copy_in(&self, dst: &Self::Buffer, dst_offset: u64, src: &Self::HostBuffer, src_offset: u64, bytes: u64);

    /// Enqueues a copy of `bytes` device to host on [`Stream::Out`]. Offsets are bytes.
    fn copy_out(&self, dst: &Self::HostBuffer, dst_offset: u64, src: &Self::Buffer, src_offset: u64, bytes: u64);

    /// Overwrites `dst` with `src` on [`Stream::Compute`], converting the dtype. `src` may be changed or dropped as
    /// soon as this returns.
    ///
    /// # Panics
    /// If the number of elements differs, or integers meet floats or other integers.
    fn upload(&self, dst: &mut Tensor<Self>, src: HostData<'_>);

    /// Waits for [`Stream::Compute`] and returns the elements of a float tensor.
    fn download_f32(&self, src: &Tensor<Self>) -> Result<Vec<f32>>;

    /// The same without rounding: what a test against f64 compares.
    fn download_f64(&self, src: &Tensor<Self>) -> Result<Vec<f64>>;

    /// Waits for [`Stream::Compute`] and returns the elements of a `U32` tensor.
    fn download_u32(&self, src: &Tensor<Self>) -> Result<Vec<u32>>;

    /// Waits for [`Stream::Compute`] and returns the elements of a `U8` tensor.
    fn download_u8(&self, src: &Tensor<Self>) -> Result<Vec<u8>>;

    /// Called for memory whose content has ended: a device made for tests overwrites it with NaN, in the order of
    /// [`Stream::Compute`], so that a stale read shows. Others do nothing.
    fn poison(&self, _ended: &mut Tensor<Self>) {}

    /// Waits for everything enqueued in every stream; reports the first failure since the last call.
    fn synchronize(&self) -> Result<()>;
}

/// Allocates a tensor of its own; for tests and for what is outside the plan.
pub fn new_tensor<B: Device>(device: &B, dtype: DType, shape: &[usize]) -> Result<Tensor<B>> {
    let elements: usize = shape.iter().product();
    let buffer = device.alloc(elements as u64 * device.element_bytes(dtype) as u64)?;
    Ok(Tensor::new(buffer, 0, dtype, device.element_bytes(dtype), shape))
}

/// A tensor with the values of `src`; for tests and for what is outside the plan.
pub fn tensor_from<B: Device>(device: &B, dtype: DType, shape: &[usize], src: HostData<'_>) -> Result<Tensor<B>> {
    let mut tensor = new_tensor(device, dtype, shape)?;
    device.upload(&mut tensor, src);
    Ok(tensor)
}

impl Error {
    /// An allocation failure with the numbers that explain it.
    pub fn out_of_memory(tier: &'static str, requested: u64, allocated: u64, detail: impl Into<String>) -> Self {
        Self::OutOfMemory { tier, requested, allocated, detail: detail.into() }
    }
}
