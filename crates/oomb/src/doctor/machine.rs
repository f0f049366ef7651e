//! What a machine offers a run, and what is wrong with it: processor, memory and its limits, disk, CUDA. It must not know
//! terminals; facts are plain data, so that tests can make any machine up.

use crate::config::Bytes;
use oomb_device::cuda::{LEAST_CAPABILITY, Survey, survey};
use rustix::process::Resource;
use std::io;
use std::path::{Path, PathBuf};

/// A machine.
#[derive(Debug)]
pub struct Facts {
    /// Threads that this process may run at once.
    pub threads: usize,
    /// Host memory, total and available, bytes.
    pub memory: Result<(u64, u64), String>,
    /// What this process's control group allows, and what of it is free, bytes; where that is less than the machine has.
    pub control_group: Option<(u64, u64)>,
    /// Most that this process may lock in memory, bytes; `None` is no limit.
    pub memlock: Option<u64>,
    /// The folder of which the disk was asked, its free bytes, and whether files can be made there.
    pub disk: (PathBuf, io::Result<u64>, bool),
    /// Drivers, GPUs, libraries.
    pub cuda: Survey,
    /// A device file `/dev/nvidia0` … is there: a container without it was started without GPUs.
    pub has_device_files: bool,
}

/// Something that is wrong or will be, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

impl Facts {
    /// This machine's, with the disk of `folder`. Opens CUDA's libraries, allocates nothing.
    pub fn of_this_machine(folder: &Path) -> Self {
        let (memory, control_group) = host_memory();
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory,
            control_group,
            memlock: rustix::process::getrlimit(Resource::Memlock).current,
            disk: (folder.to_path_buf(), free_bytes(folder), tempfile::tempfile_in(folder).is_ok()),
            cuda: survey(),
            has_device_files: (0..16).any(|index| Path::new(&format!("/dev/nvidia{index}")).exists()),
        }
    }

    /// Whether a GPU can be used.
    pub fn has_usable_gpu(&self) -> bool {
        let libraries = self.cuda.libraries.iter().all(|library| library.found.is_ok());
        libraries && self.cuda.gpus.iter().any(|gpu| gpu.capability >= LEAST_CAPABILITY)
    }

    /// Everything that is worth a word, the gravest first.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.cuda_problems();
        problems.extend(self.host_problems());
        problems
    }

    fn cuda_problems(&self) -> Vec<Problem> {
        let cuda = &self.cuda;
        let has_hardware = cuda.num_pci > 0 || cuda.kernel_module.is_some() || cuda.driver.is_ok();
        if !has_hardware {
            return vec![problem(
                "there is no NVIDIA GPU on this machine".to_owned(),
                "small models train on the CPU; for others take a machine with a GPU of compute capability 8.0 (Ampere) or newer",
            )];
        }
        if let Err(why) = &cuda.driver {
            let remedy = if cuda.kernel_module.is_none() {
                "install NVIDIA's driver for CUDA 12 or newer (your distribution's nvidia-driver package), then reboot"
            } else if !self.has_device_files {
                "the driver runs but this container has no GPU: start it with `docker run --gpus all`, or ask the scheduler for one"
            } else {
                "make libcuda.so.1 visible: in a container, start it with NVIDIA's container toolkit; after an update, reboot"
            };
            return vec![problem(format!("the GPU cannot be used: {why}"), remedy)];
        }
        let mut problems = Vec::new();
        if cuda.gpus.is_empty() {
            let remedy = "unset CUDA_VISIBLE_DEVICES or name a GPU that exists; `nvidia-smi` lists them";
            problems.push(problem("the driver shows this process no GPU".to_owned(), remedy));
        }
        for (ordinal, gpu) in cuda.gpus.iter().enumerate().filter(|(_, gpu)| gpu.capability < LEAST_CAPABILITY) {
            let ((major, minor), (least, _)) = (gpu.capability, LEAST_CAPABILITY);
            let what = format!("cuda:{ordinal} has compute capability {major}.{minor}, wanted {least}.0 or newer");
            problems.push(problem(what, "use another GPU: set run.device, or CUDA_VISIBLE_DEVICES"));
        }
        for library in &cuda.libraries {
            if let Err(why) = &library.found {
                let remedy = "pip install nvidia-cuda-nvrtc nvidia-cublas (CUDA 13), or set OOMB_CUDA_PATH to the folder of CUDA's libraries";
                let what = format!("{} ({}) cannot be opened: {why}", library.name, library.purpose);
                problems.push(problem(what.split(". Searched").next().unwrap_or_default().to_owned(), remedy));
            }
        }
        problems
    }

    fn host_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let with_gpu = self.has_usable_gpu();
        if with_gpu && self.threads < 4 {
            let what = format!("{} threads are few for a GPU: one launches, others convert and copy", self.threads);
            problems.push(problem(what, "give this process 4 cores or more"));
        }
        if let (Some((limit, _)), Ok((total, _))) = (self.control_group, &self.memory) {
            let what = format!("the control group allows {} of the machine's {}", Bytes(limit), Bytes(*total));
            let remedy = "pages that do not fit the device are held in host memory: raise the container's limit \
                          (`docker run --memory`, the job's memory) for longer contexts";
            problems.push(problem(what, remedy));
        }
        if let (true, Some(limit)) = (with_gpu, self.memlock) {
            let what = format!("at most {} may be locked in memory", Bytes(limit));
            let remedy = "harmless where the GPU's driver pins memory itself, as on bare Linux; if pinning fails, `ulimit -l unlimited` \
                          (in Docker `--ulimit memlock=-1`)";
            problems.push(problem(what, remedy));
        }
        let (folder, free, writable) = &self.disk;
        if !writable {
            let what = format!("no file can be made in {}", folder.display());
            problems.push(problem(what, "start oomb in a folder of yours, or set run.out to one"));
        }
        match free {
            Ok(bytes) if *bytes < LITTLE_DISK_BYTES => {
                let what = format!("{} has only {} free", folder.display(), Bytes(*bytes));
                problems.push(problem(
                    what,
                    "a saved 7B model takes 15 GB, with optimizer state 90 GB: make room, or set run.out to another disk",
                ));
            }
            Ok(_) => {}
            Err(why) => {
                problems.push(problem(format!("cannot tell how much room {} has: {why}", folder.display()), "check the disk"))
            }
        }
        problems
    }
}

/// Below this even a small model with its tokens is tight.
const LITTLE_DISK_BYTES: u64 = 5 << 30;

fn problem(what: String, remedy: &str) -> Problem {
    Problem { what, remedy: remedy.to_owned() }
}

type Memory = Result<(u64, u64), String>;

fn host_memory() -> (Memory, Option<(u64, u64)>) {
    let mut system = match sysinfo::System::new() {
        Ok(system) => system,
        Err(error) => return (Err(error.to_string()), None),
    };
    system.refresh_memory();
    let total = system.total_memory();
    let limits = system.cgroup_limits().filter(|limits| limits.total_memory < total);
    (Ok((total, system.available_memory())), limits.map(|limits| (limits.total_memory, limits.free_memory)))
}

/// Bytes that an ordinary user may still write.
fn free_bytes(folder: &Path) -> io::Result<u64> {
    let disk = rustix::fs::statvfs(folder)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use oomb_device::cuda::{Gpu, Library};

    /// An 8-core machine with one H200 and nothing wrong.
    fn healthy() -> Facts {
        let library = |name, purpose| Library { name, purpose, found: Ok(PathBuf::from("/usr/lib").join(name)) };
        let cuda = Survey {
            driver: Ok((13, 0)),
            kernel_module: Some("580.159.03".to_owned()),
            num_pci: 1,
            gpus: vec![Gpu { name: "NVIDIA H200".to_owned(), capability: (9, 0), memory_bytes: 150 << 30 }],
            libraries: vec![library("libcuda", "the driver"), library("libnvrtc", "compiles kernels")],
            variables: Vec::new(),
            folders: Vec::new(),
        };
        Facts {
            threads: 8,
            memory: Ok((128 << 30, 100 << 30)),
            control_group: None,
            memlock: None,
            disk: (PathBuf::from("/data"), Ok(1 << 40), true),
            cuda,
            has_device_files: true,
        }
    }

    /// Problem and remedy, a line each, of a healthy machine with something changed.
    fn told(change: impl FnOnce(&mut Facts)) -> String {
        let mut facts = healthy();
        change(&mut facts);
        facts.problems().iter().map(|problem| format!("{}\n  {}\n", problem.what, problem.remedy)).collect()
    }

    #[test]
    fn a_healthy_machine_has_no_problem() {
        assert_eq!(told(|_| {}), "");
        assert!(healthy().has_usable_gpu());
    }

    #[test]
    fn what_keeps_a_gpu_from_being_used_is_told_apart() {
        let no_driver = |facts: &mut Facts| facts.cuda.driver = Err("no libcuda".to_owned());
        let none = told(|facts| {
            no_driver(facts);
            (facts.cuda.num_pci, facts.cuda.kernel_module) = (0, None);
        });
        assert!(none.starts_with("there is no NVIDIA GPU"), "{none}");
        let not_installed = told(|facts| {
            no_driver(facts);
            facts.cuda.kernel_module = None;
        });
        assert!(not_installed.contains("no libcuda\n  install NVIDIA's driver"), "{not_installed}");
        let container = told(|facts| {
            no_driver(facts);
            facts.has_device_files = false;
        });
        assert!(container.contains("--gpus all"), "{container}");
        assert!(told(no_driver).contains("libcuda.so.1"));
        assert!(told(|facts| facts.cuda.gpus.clear()).contains("CUDA_VISIBLE_DEVICES"));
        assert!(told(|facts| facts.cuda.gpus[0].capability = (7, 5)).contains("cuda:0 has compute capability 7.5, wanted 8.0"));
        let library = told(|facts| facts.cuda.libraries[1].found = Err("libnvrtc not found. Searched: everywhere".to_owned()));
        assert!(
            library.starts_with("libnvrtc (compiles kernels) cannot be opened: libnvrtc not found\n  pip install"),
            "{library}"
        );
    }

    #[test]
    fn limits_of_the_host_are_named_with_their_numbers() {
        let group = told(|facts| facts.control_group = Some((16 << 30, 10 << 30)));
        assert!(group.starts_with("the control group allows 16.00 GiB of the machine's 128.00 GiB"), "{group}");
        assert!(told(|facts| facts.memlock = Some(8 << 20)).contains("8.00 MiB may be locked"));
        assert!(told(|facts| facts.disk.1 = Ok(1 << 30)).starts_with("/data has only 1.00 GiB free"));
        assert!(told(|facts| facts.disk.2 = false).starts_with("no file can be made in /data"));
        assert!(told(|facts| facts.threads = 2).starts_with("2 threads are few for a GPU"));
        let on_cpu = |facts: &mut Facts| {
            facts.cuda.gpus.clear();
            (facts.threads, facts.memlock) = (2, Some(1));
        };
        assert_eq!(told(on_cpu).lines().count(), 2, "limits that concern a GPU alone are not told without one");
    }
}
