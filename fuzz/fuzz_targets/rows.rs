//! A digit for the kind of file, and any bytes as that file of rows: it is refused, or what was prepared from it can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::config::{DataFormat, Malformed, RowSettings, TokenizerSource};
use oomb::data::{Existing, PrepareRequest, Reading, Tokenizer, prepare};
use std::fs;
use std::sync::{LazyLock, Once};
use tempfile::TempDir;

const NAMES: [&str; 4] = ["rows.jsonl", "rows.parquet", "rows.jsonl.gz", "rows.jsonl.zst"];

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::load(&TokenizerSource::Bytes).expect("bytes"));
static QUIET: Once = Once::new();

// Panics of the Parquet library that become errors do not count: the hook that would end the process at each is taken away. One
// that leaves the target still ends it.
fuzz_target!(|bytes: &[u8]| {
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let malformed = if kind & 4 == 0 { Malformed::Error } else { Malformed::Skip };
    let settings = RowSettings { format: Some(DataFormat::Text), malformed: Some(malformed), ..RowSettings::default() };
    let reading = Reading::load(&settings, &TOKENIZER).expect("no template is needed");
    let (path, out) = (FOLDER.path().join(NAMES[usize::from(kind & 3)]), FOLDER.path().join("prepared"));
    fs::write(&path, bytes).expect("a file of rows");
    let (inputs, existing) = (std::slice::from_ref(&path), Existing::Overwrite);
    match prepare(&PrepareRequest { inputs, out: &out, tokenizer: &TOKENIZER, reading: &reading, existing }, &mut |_| {}) {
        Ok(prepared) => {
            let dataset = prepared.into_dataset();
            let num_tokens = dataset.num_tokens();
            assert_eq!(dataset.tokens(0..num_tokens).expect("what was just prepared").len() as u64, num_tokens);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    fs::remove_file(path).expect("it was written");
});
