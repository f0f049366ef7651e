//! Any bytes as the weights of a small checkpoint: they are refused, or every tensor of the model can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::checkpoint::Checkpoint;
use oomb::model::params::param_specs;
use std::fs;
use std::sync::LazyLock;
use tempfile::TempDir;

/// The shape that `seeds/safetensors` holds weights of.
const CONFIG: &str = include_str!("../../crates/oomb/tests/golden/llama_tied/config.json");

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("config.json"), CONFIG).expect("a configuration");
    folder
});

fuzz_target!(|bytes: &[u8]| {
    fs::write(FOLDER.path().join("model.safetensors"), bytes).expect("a weight file");
    match Checkpoint::open(FOLDER.path()) {
        Ok(checkpoint) => {
            for (name, _) in param_specs(checkpoint.config()).iter().flat_map(|spec| &spec.sources) {
                checkpoint.tensor(name).expect("a tensor of a checkpoint that was checked");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
