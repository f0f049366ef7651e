//! What there is of CUDA on this machine, found without allocating anything: driver, GPUs, libraries, and the places searched.
//!
//! It must not judge: whoever prints a survey says what to do about it.

use super::driver;
use super::library::{self, PATH_VARIABLE};
use cudarc::driver::sys::CUdevice_attribute;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// A machine's CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// Newest CUDA version that the driver speaks, `(13, 0)`; or why it does not.
    pub driver: Result<(i32, i32), String>,
    /// Version of the kernel's part of the driver, `580.159.03`, where one is loaded.
    pub kernel_module: Option<String>,
    /// NVIDIA display and compute devices on the PCI bus, whether or not a driver runs them.
    pub num_pci: usize,
    /// GPUs that this process may use, by ordinal.
    pub gpus: Vec<Gpu>,
    /// Libraries that are opened at run time.
    pub libraries: Vec<Library>,
    /// Variables that lead to places of libraries, and their values.
    pub variables: Vec<(&'static str, Option<String>)>,
    /// Existing folders searched after the loader's own path, in order.
    pub folders: Vec<PathBuf>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// What the vendor calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// All its memory, bytes.
    pub memory_bytes: u64,
}

/// One library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// `"libnvrtc"`.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
    /// Where it was opened from; or why it was not.
    pub found: Result<PathBuf, String>,
}

/// Least compute capability that the kernels are compiled for.
pub const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// Looks. Opens the libraries, as a run would.
pub fn survey() -> Survey {
    let driver = library::open_driver().and_then(|()| start_driver());
    let gpus = if driver.is_ok() { gpus() } else { Vec::new() };
    let opened = |stem: &str, outcome: Result<(), String>| outcome.map(|()| loaded_from(stem));
    let libraries = vec![
        Library { name: "libcuda", purpose: "the driver", found: opened("libcuda", library::open_driver()) },
        Library { name: "libnvrtc", purpose: "compiles kernels", found: opened("libnvrtc", library::open_nvrtc()) },
        Library { name: "libcublasLt", purpose: "matrix products", found: opened("libcublasLt", library::open_cublaslt()) },
    ];
    let variables = [PATH_VARIABLE, "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"]
        .map(|name| (name, env::var_os(name).map(|value| value.to_string_lossy().into_owned())));
    Survey {
        driver,
        kernel_module: kernel_module(),
        num_pci: num_pci(Path::new("/sys/bus/pci/devices")),
        gpus,
        libraries,
        variables: variables.to_vec(),
        folders: library::folders(),
    }
}

fn start_driver() -> Result<(i32, i32), String> {
    driver::init().map_err(|error| format!("the driver does not start: {error}"))?;
    let version = driver::version().map_err(|error| format!("the driver does not tell its version: {error}"))?;
    Ok((version / 1000, version % 1000 / 10))
}

fn gpus() -> Vec<Gpu> {
    let count = driver::device_count().ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    (0..count).filter_map(gpu).collect()
}

fn gpu(ordinal: usize) -> Option<Gpu> {
    let device = driver::device(ordinal).ok()?;
    let major = driver::attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).ok()?;
    let minor = driver::attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR).ok()?;
    let (name, memory_bytes) = (driver::device_name(device).ok()?, driver::total_memory(device).ok()?);
    Some(Gpu { name, capability: (major, minor), memory_bytes })
}

/// The file behind a library of this process, from the kernel's list of mappings; its bare name where that does not say.
fn loaded_from(stem: &str) -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    mapped(&maps, stem).unwrap_or_else(|| PathBuf::from(format!("{stem}.so")))
}

fn mapped(maps: &str, stem: &str) -> Option<PathBuf> {
    let prefix = format!("{stem}.so");
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths
        .map(Path::new)
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
        .map(Path::to_path_buf)
}

fn kernel_module() -> Option<String> {
    fs::read_to_string("/sys/module/nvidia/version").ok().map(|text| text.trim().to_owned())
}

/// Counts PCI devices of NVIDIA (vendor 10de) that are displays or 3D controllers (class 03).
fn num_pci(devices: &Path) -> usize {
    let is = |folder: &Path, file: &str, prefix: &str| {
        fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim().starts_with(prefix))
    };
    let entries = fs::read_dir(devices).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|folder| is(folder, "vendor", "0x10de") && is(folder, "class", "0x03")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_behind_a_library_is_read_from_the_mappings() {
        let maps = "7f00-7f01 r--p 00000000 fe:00 12  /usr/lib/libcublas.so.13\n7f01-7f02 r-xp 0 fe:00 13  /opt/a b/libcublasLt.so.13\n\
                    7f03-7f04 rw-p 00000000 00:00 0\n";
        assert_eq!(mapped(maps, "libcublasLt"), Some(PathBuf::from("/opt/a b/libcublasLt.so.13")));
        assert_eq!(mapped(maps, "libnvrtc"), None);
    }

    #[test]
    fn gpus_on_the_bus_are_counted_without_a_driver() {
        let folder = env::temp_dir().join(format!("oomb-pci-{}", std::process::id()));
        for (name, vendor, class) in [("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")] {
            fs::create_dir_all(folder.join(name)).unwrap();
            fs::write(folder.join(name).join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(folder.join(name).join("class"), format!("{class}\n")).unwrap();
        }
        let counted = num_pci(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(counted, 1);
    }

    #[test]
    fn a_survey_is_complete_with_or_without_a_gpu() {
        let survey = survey();
        assert_eq!(survey.libraries.len(), 3);
        assert!(survey.driver.is_ok() || survey.gpus.is_empty());
        for library in &survey.libraries {
            if let Err(why) = &library.found {
                assert!(why.contains("not"), "{why}");
            }
        }
    }
}
