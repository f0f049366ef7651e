//! Every CUDA kernel compiles for every architecture that is promised, and none spills registers. Needs NVRTC, not a GPU.

use oomb_device::cuda;

/// Ampere, Hopper with its own instructions, Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

#[test]
fn kernels_compile_without_spills() {
    if let Err(error) = cuda::nvrtc_version() {
        // Where the compiler was installed on purpose it must be found.
        assert!(std::env::var_os(cuda::PATH_VARIABLE).is_none(), "{error}");
        eprintln!("skipped: {error}");
        return;
    }
    for arch in ARCHITECTURES {
        let reports = cuda::compile_all(arch).unwrap();
        assert!(reports.len() > 20, "{arch}: only {} kernels reported", reports.len());
        let spilling: Vec<_> = reports.iter().filter(|report| report.spill_bytes > 0).collect();
        assert!(spilling.is_empty(), "{arch}: {spilling:#?}");
    }
}
