//! Finds CUDA's shared libraries and opens them before anything calls into them.
//!
//! It owns the list of places searched. It must not know what the libraries are used for.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Folder, or several separated by `:`, searched before all others; it may hold the libraries themselves, `lib`, `lib64`,
/// or the `nvidia/*/lib` of wheels installed with `pip install --target`.
pub const PATH_VARIABLE: &str = "OOMB_CUDA_PATH";

/// Opens the driver library, which comes with the GPU driver and nowhere else.
pub(super) fn open_driver() -> Result<(), String> {
    // SAFETY: opening libcuda runs its initialisers only.
    if unsafe { cudarc::driver::sys::is_culib_present() } {
        return Ok(());
    }
    Err("no NVIDIA driver: libcuda.so.1 is not on the loader's path; install the driver, or run with --device cpu".into())
}

/// Opens NVRTC, the run-time compiler.
pub(super) fn open_nvrtc() -> Result<(), String> {
    // SAFETY: opening libnvrtc runs its initialisers only.
    open("nvrtc", || unsafe { cudarc::nvrtc::sys::is_culib_present() })
}

/// Opens cuBLASLt.
pub(super) fn open_cublaslt() -> Result<(), String> {
    // SAFETY: opening libcublasLt runs its initialisers only.
    open("cublasLt", || unsafe { cudarc::cublaslt::sys::is_culib_present() })
}

/// Makes `lib{stem}` present: as the loader finds it, else by absolute path from the places of [`folders`]. A library once
/// open is found again by its bare name, which is how cudarc asks for it.
fn open(stem: &str, is_present: impl Fn() -> bool) -> Result<(), String> {
    static OPENING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = OPENING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folders = folders();
    // A folder named on purpose comes before what the loader would find.
    if env::var_os(PATH_VARIABLE).is_none() && is_present() {
        return Ok(());
    }
    for folder in &folders {
        for file in library_files(folder, &format!("lib{stem}.so")) {
            // NVRTC opens its builtins by bare name; where they lie beside it, they are opened first.
            for builtins in library_files(folder, &format!("lib{stem}-builtins.so")) {
                preload(&builtins);
            }
            if preload(&file) && is_present() {
                return Ok(());
            }
        }
    }
    if is_present() {
        return Ok(());
    }
    let searched: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(format!(
        "lib{stem} not found. Searched: the loader's path (LD_LIBRARY_PATH, ldconfig){}{}. Install CUDA 13 (or `pip install \
         nvidia-cuda-nvrtc nvidia-cublas`) or set {PATH_VARIABLE} to the folder that holds it",
        if searched.is_empty() { "" } else { ", " },
        searched.join(", ")
    ))
}

/// Opens a library for the rest of the process; false where the loader refuses it.
fn preload(file: &Path) -> bool {
    // SAFETY: these are CUDA's libraries, whose initialisers have no precondition.
    match unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// Files of `folder` whose name starts with `prefix`, in order of name; alternative builds (`.alt.`) are left out.
fn library_files(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            name.starts_with(prefix) && !name.contains(".alt.")
        })
        .collect();
    files.sort();
    files
}

/// Every existing folder in which a CUDA library may lie, most wanted first.
pub(super) fn folders() -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(paths) = env::var_os(PATH_VARIABLE) {
        for path in env::split_paths(&paths) {
            found.push(path.clone());
            found.extend([path.join("lib64"), path.join("lib")]);
            found.extend(subfolders(&path.join("nvidia"), "", "lib"));
        }
    }
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(path) = env::var_os(variable).map(PathBuf::from) {
            found.extend([path.join("lib64"), path.join("lib")]);
        }
    }
    for prefix in python_prefixes() {
        for site in subfolders(&prefix.join("lib"), "python3", "site-packages") {
            found.extend(subfolders(&site.join("nvidia"), "", "lib"));
        }
        found.push(prefix.join("lib"));
    }
    found.extend(subfolders(Path::new("/usr/local"), "cuda", "lib64"));
    found.retain(|folder| folder.is_dir());
    let mut unique = Vec::with_capacity(found.len());
    for folder in found {
        if !unique.contains(&folder) {
            unique.push(folder);
        }
    }
    unique
}

/// Prefixes of the Python installations at hand: the active environment's, and that of the `python3` on the path.
fn python_prefixes() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|variable| env::var_os(variable).map(PathBuf::from)).collect();
    if let Some(path) = env::var_os("PATH") {
        let python = env::split_paths(&path).find(|folder| folder.join("python3").exists());
        prefixes.extend(python.and_then(|folder| folder.parent().map(Path::to_path_buf)));
    }
    prefixes.extend(env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    prefixes
}

/// `parent/{name}/{child}` for every `name` that starts with `prefix`, greatest name first: the newest version.
fn subfolders(parent: &Path, prefix: &str, child: &str) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> = fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .collect();
    names.sort_by(|a, b| b.cmp(a));
    names.into_iter().map(|path| path.join(child)).collect()
}
