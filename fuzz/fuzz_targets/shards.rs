//! Any `index.json`, a zero byte, and any shard: the dataset is refused, or all of it can be cut into sequences. Checksums are
//! made right first, so that what lies behind them is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::data::{Dataset, Windows};
use serde_json::Value;
use std::fs;
use std::sync::LazyLock;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

fuzz_target!(|bytes: &[u8]| {
    let middle = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let (index, shard) = (&bytes[..middle], bytes.get(middle + 1..).unwrap_or_default());
    let index = with_checksums(index, crc32fast::hash(shard)).unwrap_or_else(|| index.to_vec());
    fs::write(FOLDER.path().join("index.json"), index).expect("an index");
    fs::write(FOLDER.path().join("tokens-00000.bin"), shard).expect("a shard");
    match Dataset::open(FOLDER.path()) {
        Ok(dataset) => cut(dataset),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

fn with_checksums(index: &[u8], crc32: u32) -> Option<Vec<u8>> {
    let mut index: Value = serde_json::from_slice(index).ok()?;
    for shard in index.get_mut("shards")?.as_array_mut()? {
        *shard.get_mut("crc32")? = crc32.into();
    }
    serde_json::to_vec(&index).ok()
}

fn cut(dataset: Dataset) {
    let num_tokens = dataset.num_tokens();
    assert_eq!(dataset.tokens(0..num_tokens).expect("a dataset that was checked").len() as u64, num_tokens);
    let Ok(windows) = Windows::new(dataset, 3) else { return };
    for window in 0..windows.len() {
        let sequence = windows.get(window).expect("a window of a dataset that was checked");
        assert!(sequence.num_labels() < sequence.ids.len());
    }
}
