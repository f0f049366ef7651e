//! Tensors, streams and fused training ops: the contract in [`device`] and [`ops`], and its backends.
//!
//! This crate owns all unsafe code. It must not know models, schedules, pages' tiers or policy: attention ops see slots
//! and logical positions, nothing else.

pub mod cpu;
pub mod cuda;
pub mod device;
mod error;
pub mod ops;
pub mod tensor;

pub use device::{Device, HostData, Stream};
pub use error::{Error, Result};
pub use ops::Backend;
pub use tensor::{DType, Tensor};
