//! Any `tokenizer.json`, a zero byte, and any text: the file is refused, or the text becomes ids of its vocabulary.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::config::TokenizerSource;
use oomb::data::Tokenizer;
use std::fs;
use std::sync::{LazyLock, Once};
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

static QUIET: Once = Once::new();

// Panics of the tokenizer library that become errors do not count: the hook that would end the process at each is taken away. One
// that leaves the target still ends it.
fuzz_target!(|bytes: &[u8]| {
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let middle = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let text = String::from_utf8_lossy(bytes.get(middle + 1..).unwrap_or_default());
    let path = FOLDER.path().join("tokenizer.json");
    fs::write(&path, &bytes[..middle]).expect("a tokenizer file");
    match Tokenizer::load(&TokenizerSource::Path(path)) {
        Ok(tokenizer) => {
            if let Ok(ids) = tokenizer.encode(&text) {
                assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "an id outside the vocabulary");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
