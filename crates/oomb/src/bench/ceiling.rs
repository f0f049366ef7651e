//! What a machine can do at best, as measured once with the vendor's own libraries. It must not know how a figure is
//! compared with it.

/// Rates that a GPU does not exceed in practice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Matrix product of bf16, FLOP/s.
    pub product: f64,
    /// Copy within the device, bytes read plus bytes written per second.
    pub device_copy: f64,
    /// Pinned host memory to the device, bytes per second.
    pub copy_in: f64,
    /// The device to pinned host memory, bytes per second.
    pub copy_out: f64,
    /// Both at once, sum of the two.
    pub copy_both: f64,
}

/// One H200 on PCIe 5.0 x16: cuBLASLt at 8192 x 8192 x 8192, a copy kernel, and copies of 1 GiB in one call each way.
const H200: Ceilings = Ceilings { product: 798e12, device_copy: 4.26e12, copy_in: 55.4e9, copy_out: 55.3e9, copy_both: 101e9 };

impl Ceilings {
    /// Those of the GPU that its driver calls `hardware`; `None` where nothing was measured.
    pub fn of(hardware: &str) -> Option<Self> {
        hardware.starts_with("NVIDIA H200").then_some(H200)
    }
}
