//! Kernel sources to loaded functions: NVRTC on the spot for the GPU found, and a cache of the result on disk.
//!
//! It owns compilation, the cache and the loaded modules. It must not know what any kernel computes.

use super::driver::{self, Handle};
use super::{attention, attention_sm90, embed, library, loss, mlp, norm, optim, reduce, rope};
use crate::{Error, Result};
use cudarc::driver::sys::{CUfunction, CUmodule};
use cudarc::nvrtc::sys as nvrtc;
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{env, fs};

/// A macro given to the compiler.
pub(super) type Define = (&'static str, u32);

/// One `kernels/*.cu`, compiled by itself.
pub(super) struct Unit {
    /// Name of the file without `.cu`.
    pub(super) stem: &'static str,
    /// The text built into the program.
    pub(super) source: &'static str,
    /// The specialisations that [`compile_all`] tries; each is a set of macros.
    pub(super) variants: &'static [&'static [Define]],
    /// The only architecture whose instructions it uses, or any from `sm_80` on.
    pub(super) only: Option<&'static str>,
}

/// Every unit.
pub(super) const UNITS: &[&Unit] = &[
    &attention::BACKWARD,
    &attention::FORWARD,
    &attention_sm90::BACKWARD,
    &attention_sm90::FORWARD,
    &embed::UNIT,
    &loss::UNIT,
    &mlp::UNIT,
    &norm::UNIT,
    &optim::ADAMW,
    &optim::UNIT,
    &reduce::UNIT,
    &rope::UNIT,
];

/// What units include.
const HEADERS: [(&str, &str); 4] = [
    ("attention.cuh", include_str!("../../kernels/attention.cuh")),
    ("attention_walk.cuh", include_str!("../../kernels/attention_walk.cuh")),
    ("common.cuh", include_str!("../../kernels/common.cuh")),
    ("hopper.cuh", include_str!("../../kernels/hopper.cuh")),
];

/// Folder of `.cu` files read in place of those built in, for tuning without a rebuild.
pub const SOURCE_VARIABLE: &str = "OOMB_KERNELS";

/// What the assembler said of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelReport {
    /// File and macros, `"attention HEAD_DIM=128"`.
    pub unit: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread that is not spill (arrays indexed at run time), bytes.
    pub stack_bytes: u32,
    /// Registers spilled to local memory, stores and loads, bytes per thread.
    pub spill_bytes: u32,
}

/// Compiles every kernel in every variant for `arch` (`"sm_90a"`); needs NVRTC and no GPU.
///
/// # Errors
/// [`Error::Unavailable`] without NVRTC; [`Error::Failed`] with the compiler's log where a kernel does not compile.
pub fn compile_all(arch: &str) -> Result<Vec<KernelReport>> {
    let mut reports = Vec::new();
    for unit in UNITS.iter().filter(|unit| unit.only.is_none_or(|only| only == arch)) {
        for defines in unit.variants {
            let compiled = compile(unit, defines, arch)?;
            reports.extend(parse_log(&label(unit, defines), &compiled.log));
        }
    }
    Ok(reports)
}

/// CUDA version of the NVRTC found, (major, minor).
///
/// # Errors
/// [`Error::Unavailable`] naming the places searched.
pub fn nvrtc_version() -> Result<(i32, i32)> {
    library::open_nvrtc().map_err(|detail| Error::Unavailable { name: "nvrtc".into(), detail })?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers; the library is open.
    let code = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    if code != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Err(Error::Unavailable { name: "nvrtc".into(), detail: format!("nvrtcVersion answered {code:?}") });
    }
    Ok((major, minor))
}

/// The loaded modules of one GPU, compiled when first asked for.
pub(super) struct Modules {
    arch: String,
    loaded: Mutex<HashMap<(&'static str, Vec<Define>), Loaded>>,
}

struct Loaded {
    module: Handle<CUmodule>,
    functions: HashMap<&'static str, Handle<CUfunction>>,
}

impl Modules {
    /// For a GPU of compute capability `major.minor`. 9.0 takes `sm_90a`: wgmma and the bulk copy engine need the `a`.
    pub(super) fn new(major: i32, minor: i32) -> Self {
        let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
        Self { arch: format!("sm_{major}{minor}{suffix}"), loaded: Mutex::default() }
    }

    /// What kernels are compiled for, `"sm_90a"`.
    pub(super) fn arch(&self) -> &str {
        &self.arch
    }

    /// The kernel `name` of `unit` with `defines`. The context is current.
    pub(super) fn function(&self, unit: &'static Unit, defines: &[Define], name: &'static str) -> Result<Handle<CUfunction>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let failed = |detail: String| Error::Failed { op: name.into(), detail };
        let key = (unit.stem, defines.to_vec());
        let entry = match loaded.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let cubin = cached_cubin(unit, defines, &self.arch)?;
                let module = driver::load_module(&cubin)
                    .map_err(|error| failed(format!("{} for {}: {error}", label(unit, defines), self.arch)))?;
                entry.insert(Loaded { module, functions: HashMap::new() })
            }
        };
        if let Some(function) = entry.functions.get(name) {
            return Ok(*function);
        }
        let function = driver::function(entry.module, name).map_err(|error| failed(error.to_string()))?;
        entry.functions.insert(name, function);
        Ok(function)
    }

    /// Unloads everything; the device is idle and the context current.
    pub(super) fn unload(&self) {
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (_, entry) in loaded.drain() {
            // At this point nobody is left to tell; the driver frees what remains with the context.
            let _ = driver::unload_module(entry.module);
        }
    }
}

fn label(unit: &Unit, defines: &[Define]) -> String {
    defines.iter().fold(unit.stem.to_string(), |text, (name, value)| format!("{text} {name}={value}"))
}

/// A unit's text and the headers': built in, or from the folder that [`SOURCE_VARIABLE`] names.
fn sources(unit: &Unit) -> Result<(String, Vec<String>)> {
    let Some(folder) = env::var_os(SOURCE_VARIABLE).map(PathBuf::from) else {
        return Ok((unit.source.to_string(), HEADERS.iter().map(|(_, text)| (*text).to_string()).collect()));
    };
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(|error| Error::Failed {
            op: format!("compile {}", unit.stem),
            detail: format!("{SOURCE_VARIABLE}: {}: {error}", path.display()),
        })
    };
    let headers = HEADERS.iter().map(|(name, _)| read(name)).collect::<Result<_>>()?;
    Ok((read(&format!("{}.cu", unit.stem))?, headers))
}

struct Compiled {
    cubin: Vec<u8>,
    log: String,
}

fn options(defines: &[Define], arch: &str) -> Vec<String> {
    let mut options: Vec<String> =
        [&format!("--gpu-architecture={arch}"), "--std=c++17", "-lineinfo", "--ptxas-options=-v"].map(String::from).to_vec();
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

fn compile(unit: &Unit, defines: &[Define], arch: &str) -> Result<Compiled> {
    nvrtc_version()?;
    let (source, headers) = sources(unit)?;
    let failed = |detail: String| Error::Failed { op: format!("compile {} for {arch}", label(unit, defines)), detail };
    let text = |text: String| CString::new(text).map_err(|error| failed(error.to_string()));
    let source = text(source)?;
    let headers = headers.into_iter().map(text).collect::<Result<Vec<CString>>>()?;
    let names = HEADERS.iter().map(|(name, _)| text((*name).to_owned())).collect::<Result<Vec<CString>>>()?;
    let name = text(format!("{}.cu", unit.stem))?;
    let options = options(defines, arch).into_iter().map(text).collect::<Result<Vec<CString>>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

    let mut program = std::ptr::null_mut();
    let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<*const c_char>>();
    let (header, include_name) = (pointers(&headers), pointers(&names));
    // SAFETY: all texts are terminated and live until the program is destroyed; as many headers as names.
    let created = unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            header.len() as i32,
            header.as_ptr(),
            include_name.as_ptr(),
        )
    };
    if created != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Err(failed(format!("{created:?}")));
    }
    // SAFETY: the program was created above; the options are terminated.
    let code = unsafe { nvrtc::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr()) };
    let log = program_log(program);
    let cubin = if code == nvrtc::nvrtcResult::NVRTC_SUCCESS { program_cubin(program) } else { Err(code) };
    // SAFETY: created above, destroyed once.
    unsafe { nvrtc::nvrtcDestroyProgram(&mut program) };
    match cubin {
        Ok(cubin) => Ok(Compiled { cubin, log }),
        Err(code) => Err(failed(format!("{code:?}\n{log}"))),
    }
}

fn program_log(program: nvrtc::nvrtcProgram) -> String {
    let mut bytes = 0;
    // SAFETY: writes one integer; the program is alive.
    if unsafe { nvrtc::nvrtcGetProgramLogSize(program, &mut bytes) } != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return String::new();
    }
    let mut log = vec![0u8; bytes];
    // SAFETY: the buffer has the size asked for.
    unsafe { nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast()) };
    String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
}

fn program_cubin(program: nvrtc::nvrtcProgram) -> std::result::Result<Vec<u8>, nvrtc::nvrtcResult> {
    let ok = |code| if code == nvrtc::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(code) };
    let mut bytes = 0;
    // SAFETY: writes one integer; the program is alive.
    ok(unsafe { nvrtc::nvrtcGetCUBINSize(program, &mut bytes) })?;
    let mut cubin = vec![0u8; bytes];
    // SAFETY: the buffer has the size asked for.
    ok(unsafe { nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()) })?;
    Ok(cubin)
}

/// The CUBIN from disk, else compiled and put there. The key covers all that it depends on, so that a file is never stale;
/// it appears by rename, so that it is never half there. A cache that cannot be written only costs time.
fn cached_cubin(unit: &Unit, defines: &[Define], arch: &str) -> Result<Vec<u8>> {
    let (source, headers) = sources(unit)?;
    let key = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        (salt, &source, &headers, options(defines, arch)).hash(&mut hasher);
        nvrtc_version().map(|version| {
            version.hash(&mut hasher);
            hasher.finish()
        })
    };
    let file = cache_folder().map(|folder| -> Result<PathBuf> {
        Ok(folder.join(format!("{}-{arch}-{:016x}{:016x}.cubin", unit.stem, key(0)?, key(1)?)))
    });
    let file = file.transpose()?;
    if let Some(cubin) = file.as_ref().and_then(|file| fs::read(file).ok())
        && cubin.starts_with(b"\x7fELF")
    {
        return Ok(cubin);
    }
    let cubin = compile(unit, defines, arch)?.cubin;
    if let Some(file) = file {
        // The run goes on without a cache: compiling again is slower, not wrong.
        let _ = write_by_rename(&file, &cubin);
    }
    Ok(cubin)
}

fn write_by_rename(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    fs::write(&partial, bytes)?;
    fs::rename(&partial, file)
}

/// `$XDG_CACHE_HOME/oomb`, or `~/.cache/oomb`.
fn cache_folder() -> Option<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let base = base.or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("oomb"))
}

/// Reads the assembler's `-v` lines: per entry function a name, a line of stack and spills, a line of registers.
fn parse_log(unit: &str, log: &str) -> Vec<KernelReport> {
    let mut reports: Vec<KernelReport> = Vec::new();
    let number_before = |line: &str, words: &str| -> u32 {
        let before = line.split(words).next().filter(|before| before.len() < line.len()).unwrap_or("0");
        before.split_whitespace().next_back().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            reports.push(KernelReport { unit: unit.into(), kernel, registers: 0, stack_bytes: 0, spill_bytes: 0 });
        } else if let Some(report) = reports.last_mut() {
            if line.contains("bytes stack frame") {
                let spills = number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
                report.spill_bytes += spills;
                report.stack_bytes += number_before(line, " bytes stack frame");
            } else if line.contains(" registers") {
                report.registers = number_before(line, " registers");
            }
        }
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_become_reports() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'first' for 'sm_90a'\n\
            ptxas info    : Function properties for first\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers\n\
            ptxas info    : Compiling entry function 'second' for 'sm_90a'\n\
            ptxas info    : Function properties for second\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 12 registers\n";
        let report = |kernel: &str, registers, stack_bytes, spill_bytes| KernelReport {
            unit: "norm".into(),
            kernel: kernel.into(),
            registers,
            stack_bytes,
            spill_bytes,
        };
        assert_eq!(parse_log("norm", log), [report("first", 40, 8, 16), report("second", 12, 0, 0)]);
    }
}
