//! `state.json`, `config.toml`, `checksums.txt` and `optimizer.safetensors` of a run's checkpoint, with zero bytes between them: the
//! checkpoint is refused, or the run goes on from it. Without a text of their own the checksums are right, so that what lies behind
//! them is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::model::params::{ParamSpec, param_specs};
use oomb::model::presets::preset;
use oomb::state::{Checkpoints, find};
use oomb_device::DType;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

/// The parameters whose moments `seeds/checkpoint` holds: two small ones.
static SPECS: LazyLock<Vec<ParamSpec>> = LazyLock::new(|| {
    let all = param_specs(&preset("tiny").expect("a built-in shape"));
    all.into_iter().filter(|spec| spec.shape.len() == 1).take(2).collect()
});

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(4, |&byte| byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (state, config, sums, optimizer) = (part(), part(), part(), part());
    let files = [("state.json", state), ("config.toml", config), ("optimizer.safetensors", optimizer)];
    let folder = FOLDER.path().join("checkpoints/step-2");
    fs::create_dir_all(&folder).expect("a folder");
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).expect("a file of the checkpoint");
    }
    let sums = if sums.is_empty() { sums_of(&files) } else { sums.to_vec() };
    fs::write(folder.join("checksums.txt"), sums).expect("checksums");
    match Checkpoints::of(FOLDER.path()).newest() {
        Ok(newest) => {
            let checkpoint = newest.checkpoint.expect("there is one, and it is not damaged");
            for dtype in [DType::F32, DType::Bf16, DType::U8] {
                let taken = checkpoint.moments(&SPECS, dtype, |_, index, bytes: &[u8]| {
                    assert!(index < SPECS.len() && !bytes.is_empty());
                });
                assert!(taken.err().is_none_or(|error| !error.to_string().is_empty()));
            }
            go_on(FOLDER.path(), checkpoint.config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

/// Resumes with the configuration that the checkpoint was written under.
fn go_on(run: &Path, mut config: oomb::config::Config) {
    config.run.out = PathBuf::from(run);
    match find(&config) {
        Ok(found) => assert!(found.notes.iter().all(|note| !note.is_empty())),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn sums_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut text = String::new();
    for (name, bytes) in files {
        text += &format!("{:08x} {} {name}\n", crc32fast::hash(bytes), bytes.len());
    }
    text += &format!("{:08x}\n", crc32fast::hash(text.as_bytes()));
    text.into_bytes()
}
