//! The CPU backend: the reference that every test runs, and a device whose streams really reorder.
//!
//! It owns its worker threads and memory. It must not know models, schedules or tiers; each op family's file mirrors the
//! formulas of its trait.

mod args;
mod attention;
mod buffer;
mod device;
mod embed;
mod linear;
mod loss;
mod mlp;
mod norm;
mod optim;
mod parallel;
mod product;
mod real;
mod rope;
mod stream;

pub use buffer::{Buffer, HostBuffer};
pub use stream::Event;

use crate::DType;
use buffer::Ledger;
use std::sync::Arc;
use std::time::Duration;
use stream::Streams;

/// The type in which a CPU device holds every tensor tagged bf16 or f32, and in which it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Real {
    /// 32-bit: for use.
    #[default]
    F32,
    /// 64-bit: the reference against which finite differences and other backends are compared.
    F64,
}

/// Pseudo-random sleeps before the commands of each stream, to bring out a missing event. A command of a stream sleeps
/// for between nothing and that stream's maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delays {
    /// Longest sleep before an op, upload or download.
    pub compute: Duration,
    /// Longest sleep before a copy host to device.
    pub copy_in: Duration,
    /// Longest sleep before a copy device to host.
    pub copy_out: Duration,
    /// Seed of the sleeps.
    pub seed: u64,
}

/// How a [`Cpu`] computes and misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Type of storage and arithmetic. Default f32.
    pub real: Real,
    /// Tag of activations: [`DType::F32`], or [`DType::Bf16`] to round wherever a GPU would store bf16. Default f32.
    pub compute_dtype: DType,
    /// Sleeps injected into the streams. Default none.
    pub delays: Option<Delays>,
    /// Allocations start as NaN instead of zero.
    pub poison: Poison,
    /// What [`crate::Device::alloc`] may hand out in all, bytes. Default: whatever the machine has.
    pub memory_bytes: Option<u64>,
}

/// What fresh memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Poison {
    /// Zeros, as the operating system gives them.
    #[default]
    Off,
    /// Bytes 0xFF: NaN as a float, out of any range as an id.
    On,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { real: Real::F32, compute_dtype: DType::F32, delays: None, poison: Poison::Off, memory_bytes: None }
    }
}

/// A CPU device; cloning clones a handle. Three worker threads run its streams; they finish what was enqueued and end
/// when the last handle is gone.
#[derive(Clone)]
pub struct Cpu {
    shared: Arc<Shared>,
}

struct Shared {
    options: CpuOptions,
    streams: Streams,
    device_memory: Arc<Ledger>,
    pinned_memory: Arc<Ledger>,
}

impl Cpu {
    /// Starts a device.
    ///
    /// # Panics
    /// If `compute_dtype` is neither f32 nor bf16.
    pub fn new(options: CpuOptions) -> Self {
        assert!(
            matches!(options.compute_dtype, DType::F32 | DType::Bf16),
            "activations are f32 or bf16, not {:?}",
            options.compute_dtype
        );
        Self {
            shared: Arc::new(Shared {
                options,
                streams: Streams::start(options.delays),
                device_memory: Arc::default(),
                pinned_memory: Arc::default(),
            }),
        }
    }

    /// The options it was made with.
    pub fn options(&self) -> &CpuOptions {
        &self.shared.options
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new(CpuOptions::default())
    }
}

/// Runs a body with `$R` standing for the device's real type.
macro_rules! with_real {
    ($device:expr, $R:ident, $body:block) => {
        match $device.options().real {
            $crate::cpu::Real::F32 => {
                type $R = f32;
                $body
            }
            $crate::cpu::Real::F64 => {
                type $R = f64;
                $body
            }
        }
    };
}
use with_real;
