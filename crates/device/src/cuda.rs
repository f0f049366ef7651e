//! The CUDA backend: the contract on one NVIDIA GPU.
//!
//! It owns the context, three streams and the backend's own workspace; kernels are compiled for the GPU found when they are first
//! asked for. It must not know models, schedules or why a page is where it is.

mod args;
mod attention;
mod attention_sm90;
mod buffer;
mod device;
mod driver;
mod embed;
mod library;
mod linear;
mod loss;
mod mlp;
mod module;
mod norm;
mod optim;
mod reduce;
mod rope;
mod survey;

pub use buffer::{Buffer, Event, HostBuffer};
pub use library::PATH_VARIABLE;
pub use module::{KernelReport, SOURCE_VARIABLE, compile_all, nvrtc_version};
pub use survey::{Gpu, LEAST_CAPABILITY, Library, Survey, survey};

use crate::ops::attention::PageRef;
use crate::{Device, Error, Result, Stream, Tensor};
use buffer::{Context, Events, Ledger};
use cudarc::driver::sys::{CUdevice_attribute, CUstream};
use driver::{DriverError, Handle};
use linear::Products;
use module::{Define, Modules, Unit};
use std::sync::{Arc, Mutex, MutexGuard};

/// Device bytes that the backend takes for itself: the matrix library's workspace, scratch of two-step sums, page lists.
pub const WORKSPACE_BYTES: u64 = MATRIX_BYTES + SCRATCH_BYTES + PAGES_BYTES;
const MATRIX_BYTES: u64 = 64 << 20;
const SCRATCH_BYTES: u64 = 32 << 20;
/// Page lists of calls under way: a ring. A list is at most half of it: a million pages.
const PAGES_BYTES: u64 = 16 << 20;

/// Least driver: CUDA 13.0, as the API that is called.
const MIN_DRIVER: i32 = 12_000;

/// Where this is set the attention kernels are those for every GPU, also on one that has its own: for comparison.
pub const PORTABLE_VARIABLE: &str = "OOMB_PORTABLE_ATTENTION";

/// One GPU; cloning clones a handle.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    portable_attention: bool,
}

struct Shared {
    name: String,
    multiprocessors: u32,
    shared_bytes: u32,
    context: Arc<Context>,
    streams: [Handle<CUstream>; 3],
    modules: Modules,
    products: Products,
    events: Arc<Events>,
    device_ledger: Arc<Ledger>,
    pinned_ledger: Arc<Ledger>,
    workspace: u64,
    pages: Mutex<PageRing>,
    staging: Mutex<device::Staging>,
    /// The first failure since the last report; what follows is skipped.
    failure: Mutex<Option<Error>>,
}

/// Where the next page list goes: two halves in turn.
struct PageRing {
    host: Handle<*mut u8>,
    half: usize,
    used_bytes: u64,
    /// A point behind the last launch that reads each half.
    behind: [Option<Event>; 2],
}

impl Cuda {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the places searched and what to do; [`Error::OutOfMemory`] where not even the workspace fits.
    pub fn new(ordinal: usize) -> Result<Self> {
        let name = format!("cuda:{ordinal}");
        let unavailable = |detail: String| Error::Unavailable { name: name.clone(), detail };
        let failed = |what: &str, error: DriverError| unavailable(format!("{what}: {error}"));
        library::open_driver().map_err(unavailable)?;
        driver::init().map_err(|error| failed("the driver does not start", error))?;
        let version = driver::version().map_err(|error| failed("the driver does not tell its version", error))?;
        if version < MIN_DRIVER {
            let (have, want) = (format!("{}.{}", version / 1000, version % 1000 / 10), MIN_DRIVER / 1000);
            return Err(unavailable(format!("the driver supports CUDA {have}, wanted {want}.0 or newer: update the driver")));
        }
        let count = driver::device_count().map_err(|error| failed("the driver does not count GPUs", error))?;
        if ordinal >= usize::try_from(count).unwrap_or(0) {
            return Err(unavailable(format!("there are {count} GPUs, numbered from 0")));
        }
        library::open_nvrtc().map_err(unavailable)?;
        library::open_cublaslt().map_err(unavailable)?;
        Self::open(ordinal, name.clone()).map_err(|error| match error {
            Opening::Driver(what, error) => failed(what, error),
            Opening::Library(detail) => unavailable(detail),
        })
    }

    fn open(ordinal: usize, name: String) -> std::result::Result<Self, Opening> {
        let at = |what: &'static str| move |error| Opening::Driver(what, error);
        let device = driver::device(ordinal).map_err(at("the driver does not open the GPU"))?;
        let context = Context::retain(device).map(Arc::new).map_err(at("the GPU gives no context"))?;
        context.enter().map_err(at("the GPU's context cannot be used"))?;
        let attribute = |which| driver::attribute(device, which).map_err(at("the GPU does not describe itself"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) < LEAST_CAPABILITY {
            return Err(Opening::Library(format!("compute capability {major}.{minor}; wanted 8.0 (Ampere) or newer")));
        }
        let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let stream = || driver::create_stream().map_err(at("no stream"));
        let streams = [stream()?, stream()?, stream()?];
        let workspace = driver::allocate(WORKSPACE_BYTES).map_err(at("no memory for the workspace"))?;
        let pages = driver::allocate_host(PAGES_BYTES).map_err(at("no pinned memory for page lists"))?;
        let staging = device::Staging::new().map_err(at("no pinned memory for uploads"))?;
        let products = Products::new().map_err(Opening::Library)?;
        let shared = Shared {
            name,
            multiprocessors: multiprocessors.unsigned_abs(),
            shared_bytes: shared_bytes.unsigned_abs(),
            events: Events::new(&context),
            context,
            streams,
            modules: Modules::new(major, minor),
            products,
            device_ledger: Arc::default(),
            pinned_ledger: Arc::default(),
            workspace,
            pages: Mutex::new(PageRing { host: pages, half: 0, used_bytes: 0, behind: [None, None] }),
            staging: Mutex::new(staging),
            failure: Mutex::new(None),
        };
        Ok(Self { shared: Arc::new(shared), portable_attention: std::env::var_os(PORTABLE_VARIABLE).is_some() })
    }

    /// The same GPU with the attention kernels that run on every one, for comparison.
    #[must_use]
    pub fn with_portable_attention(&self) -> Self {
        Self { portable_attention: true, ..self.clone() }
    }

    fn model_name(&self) -> String {
        driver::device_name(self.shared.context.device).unwrap_or_else(|_| "unknown".to_owned())
    }

    /// Enqueues a kernel of one parameter, passed by value, on [`Stream::Compute`].
    fn launch<P: Copy>(&self, op: &'static str, kernel: &Kernel<'_>, size: Launch, params: &P) {
        if size.blocks.contains(&0) {
            return;
        }
        self.attempt(op, || {
            let function = self.shared.modules.function(kernel.unit, kernel.defines, kernel.name)?;
            let failed = |error: DriverError| Error::Failed { op: op.into(), detail: error.to_string() };
            if size.shared_bytes > 48 << 10 {
                driver::allow_shared(function, size.shared_bytes).map_err(failed)?;
            }
            // SAFETY: each launcher passes the parameter struct of the kernel it names, with addresses of checked tensors.
            unsafe {
                driver::launch(function, size.blocks, size.threads, size.shared_bytes, self.stream(Stream::Compute), params)
            }
            .map_err(failed)
        });
    }

    /// Runs something that can fail, unless something failed before; remembers the failure.
    fn attempt(&self, op: &str, action: impl FnOnce() -> Result<()>) {
        if self.failure().is_some() {
            return;
        }
        let outcome = self
            .shared
            .context
            .enter()
            .map_err(|error| Error::Failed { op: op.to_owned(), detail: error.to_string() })
            .and_then(|()| action());
        if let Err(error) = outcome {
            self.failure().get_or_insert(error);
        }
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        lock(&self.shared.failure)
    }

    fn stream(&self, stream: Stream) -> Handle<CUstream> {
        self.shared.streams[match stream {
            Stream::Compute => 0,
            Stream::In => 1,
            Stream::Out => 2,
        }]
    }

    /// Device address of a view's first element.
    fn pointer(&self, tensor: &Tensor<Self>) -> u64 {
        tensor.buffer().address() + tensor.offset_bytes()
    }

    /// Memory for the first half of a two-step sum, address and bytes; ops use it one after the other.
    fn scratch(&self) -> (u64, u64) {
        (self.shared.workspace + MATRIX_BYTES, SCRATCH_BYTES)
    }

    fn matrix_workspace(&self) -> (u64, u64) {
        (self.shared.workspace, MATRIX_BYTES)
    }

    /// Brings a page list to the device, for kernels enqueued next.
    fn stage_pages(&self, refs: &[PageRef]) -> u64 {
        let bytes = std::mem::size_of_val(refs) as u64;
        let half_bytes = PAGES_BYTES / 2;
        assert!(bytes <= half_bytes, "a list of {} pages is longer than the ring of page lists", refs.len());
        let mut ring = lock(&self.shared.pages);
        if ring.used_bytes + bytes > half_bytes {
            let (full, next) = (ring.half, 1 - ring.half);
            ring.behind[full] = Some(self.record(Stream::Compute));
            if let Some(event) = ring.behind[next].take() {
                // Long past, unless page lists are enqueued far ahead of the GPU.
                self.attempt("page list", || event.synchronize());
            }
            (ring.half, ring.used_bytes) = (next, 0);
        }
        let offset = ring.half as u64 * half_bytes + ring.used_bytes;
        let device = self.shared.workspace + MATRIX_BYTES + SCRATCH_BYTES + offset;
        ring.used_bytes += bytes.next_multiple_of(16);
        let source: &[u8] = bytemuck::cast_slice(refs);
        self.attempt("page list", || {
            // SAFETY: the ring has `PAGES_BYTES`; this run of it is not read by any copy under way (see above); the copy is in
            // stream order with the kernels that read it.
            unsafe {
                let host = ring.host.0.add(offset as usize);
                std::ptr::copy_nonoverlapping(source.as_ptr(), host, source.len());
                driver::copy_host_to_device(device, host, bytes, self.stream(Stream::Compute))
            }
            .map_err(|error| Error::Failed { op: "page list".into(), detail: error.to_string() })
        });
        device
    }
}

/// What can go wrong while a GPU is opened.
enum Opening {
    Driver(&'static str, DriverError),
    Library(String),
}

/// A kernel by name, with the macros it is compiled with.
struct Kernel<'a> {
    unit: &'static Unit,
    defines: &'a [Define],
    name: &'static str,
}

/// How many thread blocks of how many threads.
#[derive(Clone, Copy)]
struct Launch {
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
}

impl Launch {
    /// One-dimensional, without dynamic shared memory.
    fn linear(blocks: u64, threads: u32) -> Self {
        let blocks = u32::try_from(blocks).expect("a grid has fewer than 2^32 thread blocks");
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0 }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to tell of a failure here; the driver frees what remains with the process.
        let _ = self.context.enter();
        for stream in self.streams {
            let _ = driver::synchronize_stream(stream);
        }
        self.modules.unload();
        lock(&self.pages).behind = [None, None];
        let _ = driver::free(self.workspace);
        let _ = driver::free_host(lock(&self.pages).host);
        lock(&self.staging).free();
        for stream in self.streams {
            let _ = driver::destroy_stream(stream);
        }
    }
}
