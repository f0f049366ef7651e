//! What can go wrong on a device for reasons outside this program. A shape or dtype mismatch is our own mistake and panics.

/// A failure of the device or its libraries, in words a user can act on.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The device or the host refused an allocation.
    #[error("out of {tier} memory: asked for {requested} bytes, {allocated} already allocated here: {detail}")]
    OutOfMemory {
        /// `"device"` or `"pinned host"`.
        tier: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// Bytes this process had allocated in that tier before.
        allocated: u64,
        /// What the allocator said.
        detail: String,
    },
    /// No such device, or its driver or libraries are missing or too old.
    #[error("device {name} is not available: {detail}")]
    Unavailable {
        /// The device as asked for, `"cuda:0"`.
        name: String,
        /// What was searched and what to do.
        detail: String,
    },
    /// A kernel or copy failed after it was enqueued; everything computed since is void.
    #[error("the device failed while running {op}: {detail}")]
    Failed {
        /// The op that failed, or after which the failure was noticed.
        op: String,
        /// The driver's message.
        detail: String,
    },
}

/// Result with the device [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
