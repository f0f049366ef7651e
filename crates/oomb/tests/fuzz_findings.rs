//! Inputs found by `fuzz/` (see its README) that once did worse than be refused.

use oomb::data::Dataset;
use std::fs;

/// What opening a dataset with this index and this shard says.
fn refusal_of_index(index: &serde_json::Value) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("index.json"), index.to_string()).expect("a writable folder");
    fs::write(folder.path().join("tokens-00000.bin"), 7u32.to_le_bytes()).expect("a writable folder");
    let error = Dataset::open(folder.path()).expect_err("it must be refused").to_string();
    error.replace(&folder.path().display().to_string(), "DIR")
}

fn index(shard_tokens: &[u64], document_tokens: &[u64]) -> serde_json::Value {
    let shard = |num_tokens| serde_json::json!({"file": "tokens-00000.bin", "num_tokens": num_tokens, "crc32": 0});
    let document = |(index, num_tokens): (usize, &u64)| {
        let first: u64 = document_tokens[..index].iter().sum();
        serde_json::json!({"name": "a", "first_token": first, "num_tokens": num_tokens, "source_bytes": 1, "source_crc32": 0})
    };
    serde_json::json!({
        "format": "oomb-tokens", "version": 1, "tokenizer": {"kind": "bytes"}, "vocab_size": 256, "num_tokens": 1, "largest_id": 7,
        "shards": shard_tokens.iter().map(shard).collect::<Vec<_>>(),
        "documents": document_tokens.iter().enumerate().map(document).collect::<Vec<_>>(),
    })
}

#[test]
fn sums_of_an_index_that_overflow_are_refused() {
    insta::assert_snapshot!(refusal_of_index(&index(&[u64::MAX, 2], &[1])), @"DIR/index.json is damaged: 1 tokens in all, but shards have 18446744073709551615 and documents 1; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(refusal_of_index(&index(&[1], &[u64::MAX - 1, 2])), @"DIR/index.json is damaged: 1 tokens in all, but shards have 1 and documents 18446744073709551615; make it again with `oomb prepare … --overwrite`");
}

#[test]
fn shards_outside_the_folder_are_refused() {
    let mut index = index(&[1], &[1]);
    index["shards"][0]["file"] = "../tokens-00000.bin".into();
    insta::assert_snapshot!(refusal_of_index(&index), @r#"DIR/index.json is damaged: shard "../tokens-00000.bin" is not a file name; make it again with `oomb prepare … --overwrite`"#);
}

#[test]
fn a_rope_scaling_that_is_no_number_is_refused() {
    let text = "[model]\npreset = \"tiny\"\nrope_scaling = { rope_type = \"linear\", factor = nan }\n[data]\ntrain = \"a\"\n\
                sequence_tokens = 64\n[run]\nout = \"o\"\nsteps = 1\n";
    let error = oomb::config::Config::parse(text, "run.toml", &[]).expect_err("it must be refused").to_string();
    assert!(error.contains("model.rope_scaling"), "{error}");
}

/// Texts at which the tokenizer library panics.
#[test]
fn tokenizers_that_the_library_panics_at_are_refused() {
    let cut = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": tru1, "trim_offsets": true}}"#;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, cut).expect("a writable folder");
    let loaded = oomb::data::Tokenizer::load(&oomb::config::TokenizerSource::Path(path));
    let error = loaded.err().expect("it must be refused").to_string();
    assert!(error.contains("not a tokenizer.json: expected ident"), "{error}");
}
