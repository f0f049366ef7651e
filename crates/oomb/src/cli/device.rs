//! From `--device` to a backend, for commands without a configuration. It must not know commands.

use super::machine::{on_device, open_device};
use anyhow::Result;
use oomb::config::{ComputeDtype, DeviceChoice};
use oomb_device::Backend;

/// What a command does on whatever device it was given.
pub(crate) trait DeviceTask {
    /// Does it.
    fn run<B: Backend>(self, device: &B) -> Result<()>;
}

/// Opens the device and runs the task on it; activations are of the type that the device is best at.
pub(crate) fn with_device(choice: DeviceChoice, task: impl DeviceTask) -> Result<()> {
    on_device!(open_device(choice, ComputeDtype::Auto)?, |device| task.run(&device))
}
