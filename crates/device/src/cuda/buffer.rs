//! Handles that free what they name: the context, device and host memory, events.
//!
//! It must not know what the memory holds. Memory may be dropped while work that uses it is enqueued: the driver's free waits
//! for the device first.

use super::driver::{self, DriverResult, Handle};
use super::lock;
use crate::{Error, Result};
use cudarc::driver::sys::{CUcontext, CUevent};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A GPU's primary context, released with the last thing that lives in it.
pub(super) struct Context {
    pub(super) device: i32,
    handle: Handle<CUcontext>,
}

impl Context {
    pub(super) fn retain(device: i32) -> DriverResult<Self> {
        Ok(Self { device, handle: driver::retain_context(device)? })
    }

    /// Makes it the calling thread's.
    pub(super) fn enter(&self) -> DriverResult {
        driver::set_current(self.handle)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nobody is left to tell.
        let _ = driver::release_context(self.device);
    }
}

/// Bytes allocated in one tier.
#[derive(Default)]
pub(super) struct Ledger(AtomicU64);

impl Ledger {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A run of device memory.
#[derive(Clone)]
pub struct Buffer(Arc<Memory<u64>>);

/// A run of page-locked host memory.
#[derive(Clone)]
pub struct HostBuffer(Arc<Memory<Handle<*mut u8>>>);

struct Memory<T: Copy> {
    place: T,
    bytes: u64,
    free: fn(T) -> DriverResult,
    context: Arc<Context>,
    ledger: Arc<Ledger>,
}

impl<T: Copy> Memory<T> {
    fn new(place: T, bytes: u64, free: fn(T) -> DriverResult, context: &Arc<Context>, ledger: &Arc<Ledger>) -> Arc<Self> {
        ledger.0.fetch_add(bytes, Ordering::Relaxed);
        Arc::new(Self { place, bytes, free, context: context.clone(), ledger: ledger.clone() })
    }
}

impl<T: Copy> Drop for Memory<T> {
    fn drop(&mut self) {
        self.ledger.0.fetch_sub(self.bytes, Ordering::Relaxed);
        // A failure here is that of an earlier kernel, which the next report names.
        let _ = self.context.enter().and_then(|()| (self.free)(self.place));
    }
}

impl Buffer {
    pub(super) fn new(bytes: u64, context: &Arc<Context>, ledger: &Arc<Ledger>) -> Result<Self> {
        let refused = |error: driver::DriverError| Error::out_of_memory("device", bytes, ledger.bytes(), error.to_string());
        let address = context.enter().and_then(|()| driver::allocate(bytes.max(1))).map_err(refused)?;
        Ok(Self(Memory::new(address, bytes, driver::free, context, ledger)))
    }

    pub(super) fn address(&self) -> u64 {
        self.0.place
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

impl HostBuffer {
    pub(super) fn new(bytes: u64, context: &Arc<Context>, ledger: &Arc<Ledger>) -> Result<Self> {
        let refused = |error: driver::DriverError| {
            let hint = "the limits are the machine's memory, the control group's, and `ulimit -l`";
            Error::out_of_memory("pinned host", bytes, ledger.bytes(), format!("{error}; {hint}"))
        };
        let pointer = context.enter().and_then(|()| driver::allocate_host(bytes.max(1))).map_err(refused)?;
        Ok(Self(Memory::new(pointer, bytes, driver::free_host, context, ledger)))
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.0.place.0
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

/// Events that were made, for use again.
pub(super) struct Events {
    context: Arc<Context>,
    free: Mutex<Vec<Handle<CUevent>>>,
}

impl Events {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), free: Mutex::default() })
    }

    /// An event that is not recorded. The context is current.
    pub(super) fn take(self: &Arc<Self>) -> DriverResult<Event> {
        let known = lock(&self.free).pop();
        let handle = known.map_or_else(driver::create_event, Ok)?;
        Ok(Event(Some(Arc::new(Pooled { handle, pool: self.clone() }))))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.context.enter();
        for event in lock(&self.free).drain(..) {
            let _ = driver::destroy_event(event);
        }
    }
}

/// A point in a stream; nothing where recording failed, for then the failure is reported instead.
#[derive(Clone)]
pub struct Event(Option<Arc<Pooled>>);

struct Pooled {
    handle: Handle<CUevent>,
    pool: Arc<Events>,
}

impl Event {
    /// In place of one that could not be recorded.
    pub(super) fn failed() -> Self {
        Self(None)
    }

    pub(super) fn handle(&self) -> Option<Handle<CUevent>> {
        self.0.as_ref().map(|pooled| pooled.handle)
    }

    /// Makes the host wait.
    pub(super) fn synchronize(&self) -> Result<()> {
        let failed = |error: driver::DriverError| Error::Failed { op: "wait for an event".into(), detail: error.to_string() };
        self.handle().map_or(Ok(()), |handle| driver::synchronize_event(handle).map_err(failed))
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        // A wait for it that is enqueued has taken its point already.
        lock(&self.pool.free).push(self.handle);
    }
}
