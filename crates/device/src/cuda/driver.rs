//! The driver calls this backend makes, each as one small function with a `Result`.
//!
//! It owns no object's lifetime: handles are freed by whoever keeps them. It must not know tensors or ops.

use cudarc::driver::sys::{self, CUcontext, CUdevice_attribute, CUevent, CUfunction, CUmodule, CUresult, CUstream};
use std::ffi::{CStr, CString, c_void};
use std::fmt;

/// A driver handle that may cross threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle<T: Copy>(pub(super) T);

// SAFETY: driver handles are process-wide names; the driver does its own locking.
unsafe impl<T: Copy> Send for Handle<T> {}
// SAFETY: as above; sharing a handle shares a name.
unsafe impl<T: Copy> Sync for Handle<T> {}

/// What the driver answered instead of success.
#[derive(Debug, Clone, Copy)]
pub(super) struct DriverError(pub(super) CUresult);

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = std::ptr::null();
        // SAFETY: writes one pointer to a static string, or null for an unknown code.
        unsafe { sys::cuGetErrorString(self.0, &mut text) };
        if text.is_null() {
            return write!(f, "driver error {:?}", self.0);
        }
        // SAFETY: not null, hence a static C string.
        let text = unsafe { CStr::from_ptr(text) };
        write!(f, "{} ({:?})", text.to_string_lossy(), self.0)
    }
}

pub(super) type DriverResult<T = ()> = Result<T, DriverError>;

fn check(code: CUresult) -> DriverResult {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError(code)) }
}

/// Makes the driver ready; harmless when repeated.
pub(super) fn init() -> DriverResult {
    // SAFETY: no precondition.
    check(unsafe { sys::cuInit(0) })
}

/// CUDA version of the driver, `1000 · major + 10 · minor`.
pub(super) fn version() -> DriverResult<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

/// Number of GPUs.
pub(super) fn device_count() -> DriverResult<i32> {
    let mut count = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count)
}

/// The driver's number of a GPU.
pub(super) fn device(ordinal: usize) -> DriverResult<i32> {
    let mut device = 0;
    // SAFETY: writes one integer; an ordinal out of range is answered with an error.
    check(unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) })?;
    Ok(device)
}

/// One attribute of a GPU.
pub(super) fn attribute(device: i32, attribute: CUdevice_attribute) -> DriverResult<i32> {
    let mut value = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

/// What the vendor calls a GPU.
pub(super) fn device_name(device: i32) -> DriverResult<String> {
    let mut name = [0; 256];
    // SAFETY: writes at most 255 characters and a zero.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) })?;
    // SAFETY: the driver terminates the string within the array.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

/// All memory of a GPU, bytes; needs no context.
pub(super) fn total_memory(device: i32) -> DriverResult<u64> {
    let mut bytes = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, device) })?;
    Ok(bytes as u64)
}

/// Retains a GPU's primary context.
pub(super) fn retain_context(device: i32) -> DriverResult<Handle<CUcontext>> {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle.
    check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
    Ok(Handle(context))
}

/// Undoes one [`retain_context`].
pub(super) fn release_context(device: i32) -> DriverResult {
    // SAFETY: called once per retain, when nothing of the context is in use.
    check(unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) })
}

/// Makes a context the calling thread's.
pub(super) fn set_current(context: Handle<CUcontext>) -> DriverResult {
    // SAFETY: the context is retained while its device lives.
    check(unsafe { sys::cuCtxSetCurrent(context.0) })
}

/// A stream that does not synchronise with the null stream.
pub(super) fn create_stream() -> DriverResult<Handle<CUstream>> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one handle; a context is current.
    check(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32) })?;
    Ok(Handle(stream))
}

/// Waits for a stream.
pub(super) fn synchronize_stream(stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: the stream lives as long as its device.
    check(unsafe { sys::cuStreamSynchronize(stream.0) })
}

/// Frees a stream.
pub(super) fn destroy_stream(stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: called once, by the device that owns the stream.
    check(unsafe { sys::cuStreamDestroy_v2(stream.0) })
}

/// An event without a clock.
pub(super) fn create_event() -> DriverResult<Handle<CUevent>> {
    let mut event = std::ptr::null_mut();
    // SAFETY: writes one handle; a context is current.
    check(unsafe { sys::cuEventCreate(&mut event, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32) })?;
    Ok(Handle(event))
}

/// Records the point a stream has reached.
pub(super) fn record_event(event: Handle<CUevent>, stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: both handles live as long as their device.
    check(unsafe { sys::cuEventRecord(event.0, stream.0) })
}

/// Makes a stream wait for an event; the event may be recorded anew once this has returned.
pub(super) fn wait_event(stream: Handle<CUstream>, event: Handle<CUevent>) -> DriverResult {
    // SAFETY: both handles live as long as their device.
    check(unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) })
}

/// Makes the host wait for an event.
pub(super) fn synchronize_event(event: Handle<CUevent>) -> DriverResult {
    // SAFETY: the event lives as long as its device.
    check(unsafe { sys::cuEventSynchronize(event.0) })
}

/// Frees an event.
pub(super) fn destroy_event(event: Handle<CUevent>) -> DriverResult {
    // SAFETY: called once, by the pool that owns the event.
    check(unsafe { sys::cuEventDestroy_v2(event.0) })
}

/// Takes device memory, aligned to 256 bytes or more.
pub(super) fn allocate(bytes: u64) -> DriverResult<u64> {
    let mut address = 0;
    // SAFETY: writes one address; a context is current.
    check(unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) })?;
    Ok(address)
}

/// Gives device memory back.
pub(super) fn free(address: u64) -> DriverResult {
    // SAFETY: called once per allocation, after every stream that could use it was synchronised.
    check(unsafe { sys::cuMemFree_v2(address) })
}

/// Takes page-locked host memory, cached (not write-combined) so that the CPU reads it at full speed.
pub(super) fn allocate_host(bytes: u64) -> DriverResult<Handle<*mut u8>> {
    let mut pointer: *mut c_void = std::ptr::null_mut();
    // SAFETY: writes one pointer; a context is current.
    check(unsafe { sys::cuMemHostAlloc(&mut pointer, bytes as usize, sys::CU_MEMHOSTALLOC_PORTABLE) })?;
    Ok(Handle(pointer.cast()))
}

/// Gives page-locked host memory back.
pub(super) fn free_host(pointer: Handle<*mut u8>) -> DriverResult {
    // SAFETY: called once per allocation, after every stream that could use it was synchronised.
    check(unsafe { sys::cuMemFreeHost(pointer.0.cast()) })
}

/// Device memory (free, in all), bytes.
pub(super) fn memory_info() -> DriverResult<(u64, u64)> {
    let (mut free, mut total) = (0usize, 0usize);
    // SAFETY: writes two integers; a context is current.
    check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
    Ok((free as u64, total as u64))
}

/// Enqueues a copy host to device.
///
/// # Safety
/// `src` is readable for `bytes` until the copy is done (for pageable memory: until this returns), `dst` is a device run
/// of at least `bytes`.
pub(super) unsafe fn copy_host_to_device(dst: u64, src: *const u8, bytes: u64, stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: the caller's.
    check(unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src.cast(), bytes as usize, stream.0) })
}

/// Enqueues a copy device to host.
///
/// # Safety
/// `dst` is writable for `bytes` until the copy is done, `src` is a device run of at least `bytes`.
pub(super) unsafe fn copy_device_to_host(dst: *mut u8, src: u64, bytes: u64, stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: the caller's.
    check(unsafe { sys::cuMemcpyDtoHAsync_v2(dst.cast(), src, bytes as usize, stream.0) })
}

/// Enqueues zeros.
pub(super) fn zero(dst: u64, bytes: u64, stream: Handle<CUstream>) -> DriverResult {
    // SAFETY: callers pass runs of memory that they own.
    check(unsafe { sys::cuMemsetD8Async(dst, 0, bytes as usize, stream.0) })
}

/// A tensor as the copy engine of compute capability 9.0 sees it; kernels take it by value.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct TensorMap([u64; 16]);

/// What a [`TensorMap`] describes: a tensor and the part of it that is copied at once.
pub(super) struct MapShape<'a> {
    pub(super) element: MapElement,
    /// Innermost first.
    pub(super) dims: &'a [u64],
    /// Bytes from one element to the next, of each dimension but the innermost; multiples of 16.
    pub(super) strides: &'a [u64],
    /// Elements copied at once; 128 bytes of the innermost dimension.
    pub(super) part: &'a [u32],
}

#[derive(Clone, Copy)]
pub(super) enum MapElement {
    Bf16,
    F32,
}

/// Describes device memory for the copy engine: parts lie in shared memory in the 128-byte swizzle, and what is outside the
/// tensor is read as zero and not written.
pub(super) fn tensor_map(address: u64, shape: &MapShape<'_>) -> DriverResult<TensorMap> {
    let rank = shape.dims.len();
    assert!((shape.strides.len() + 1, shape.part.len()) == (rank, rank), "a tensor map of {rank} dimensions");
    let element = match shape.element {
        MapElement::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        MapElement::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    };
    let mut map = TensorMap([0; 16]);
    let element_strides = [1; 5];
    // SAFETY: the map has the size and alignment of the driver's; every list has `rank` elements (strides one less); the driver
    // checks the rest and reads no memory of the device.
    check(unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            element,
            rank as u32,
            address as *mut c_void,
            shape.dims.as_ptr(),
            shape.strides.as_ptr(),
            shape.part.as_ptr(),
            element_strides.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(map)
}

/// Loads machine code for the current context's GPU.
pub(super) fn load_module(cubin: &[u8]) -> DriverResult<Handle<CUmodule>> {
    let mut module = std::ptr::null_mut();
    // SAFETY: a CUBIN is a self-describing ELF image; the driver copies it and refuses what it cannot run.
    check(unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
    Ok(Handle(module))
}

/// Frees a module and its functions.
pub(super) fn unload_module(module: Handle<CUmodule>) -> DriverResult {
    // SAFETY: called once, when no launch of its functions is pending.
    check(unsafe { sys::cuModuleUnload(module.0) })
}

/// A function of a module.
pub(super) fn function(module: Handle<CUmodule>, name: &str) -> DriverResult<Handle<CUfunction>> {
    let name = CString::new(name).expect("kernel names have no zero byte");
    let mut function = std::ptr::null_mut();
    // SAFETY: writes one handle; the name is terminated.
    check(unsafe { sys::cuModuleGetFunction(&mut function, module.0, name.as_ptr()) })?;
    Ok(Handle(function))
}

/// Lets launches of a function take up to `bytes` of dynamic shared memory.
pub(super) fn allow_shared(function: Handle<CUfunction>, bytes: u32) -> DriverResult {
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function's module is loaded.
    check(unsafe { sys::cuFuncSetAttribute(function.0, attribute, bytes as i32) })
}

/// Enqueues a launch whose kernel takes one parameter, passed by value.
///
/// # Safety
/// The kernel's only parameter has the layout of `P`, and every address in `params` is good for what the kernel does.
pub(super) unsafe fn launch<P: Copy>(
    function: Handle<CUfunction>,
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    stream: Handle<CUstream>,
    params: &P,
) -> DriverResult {
    let mut list = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
    let [x, y, z] = blocks;
    // SAFETY: the driver copies the parameter before it returns; the rest is the caller's.
    check(unsafe {
        sys::cuLaunchKernel(function.0, x, y, z, threads, 1, 1, shared_bytes, stream.0, list.as_mut_ptr(), std::ptr::null_mut())
    })
}
