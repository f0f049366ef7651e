//! From `--device` to a backend: the one place where a command's code is instantiated for each. It must not know commands.

use anyhow::{Result, bail};
use oomb::config::DeviceChoice;
use oomb_device::Backend;
use oomb_device::cpu::Cpu;

/// What a command does on whatever device it was given.
pub(crate) trait DeviceTask {
    /// Does it.
    fn run<B: Backend>(self, device: &B) -> Result<()>;
}

/// Opens the device and runs the task on it; activations are of the type that the device is best at.
pub(crate) fn with_device(choice: DeviceChoice, task: impl DeviceTask) -> Result<()> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => task.run(&Cpu::default()),
        DeviceChoice::Cuda(_) => bail!("device {choice} is not available: this version runs on the CPU only; use \"cpu\""),
    }
}
