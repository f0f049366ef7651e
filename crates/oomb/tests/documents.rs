//! The documents say what the program does.

use oomb::config::Config;
use std::fs;
use std::path::Path;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every key of a resolved configuration has a row in the manual, and every row is a key.
#[test]
fn the_manual_has_every_key() {
    let text = read("configs/emma.toml");
    let optional = ["data.validation=data/other.txt", "lora.dropout=0"].map(str::to_owned);
    let resolved = Config::parse(&text, "emma.toml", &optional).unwrap().to_toml();
    let mut keys: Vec<String> = ["path", "rope_scaling", "sources", "format", "field", "chat_template", "loss_on", "malformed"]
        .map(str::to_owned)
        .to_vec();
    keys.extend(resolved.lines().filter_map(|line| Some(line.split_once(" = ")?.0.to_owned())));
    let manual = read("docs/configuration.md");
    let rows: Vec<&str> =
        manual.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`').map(|(key, _)| key)).collect();
    for key in &keys {
        assert!(rows.contains(&key.as_str()), "docs/configuration.md has no row for {key}");
    }
    for row in rows {
        assert!(keys.iter().any(|key| key == row), "docs/configuration.md has a row for {row}, which is no key");
    }
}

/// The example configurations are read without complaint.
#[test]
fn examples_parse() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        Config::load(&entry.unwrap().path(), &[]).unwrap();
        count += 1;
    }
    assert!(count > 0);
}
