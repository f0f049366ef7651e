//! Any text as a configuration, lines that begin with `--set ` as overrides: it is refused, or it survives being written out
//! and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oomb::config::Config;

fuzz_target!(|text: &str| {
    let (overrides, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("--set "));
    let overrides: Vec<String> = overrides.iter().map(|line| line["--set ".len()..].to_owned()).collect();
    match Config::parse(&lines.join("\n"), "fuzz.toml", &overrides) {
        Ok(config) => {
            let again = Config::parse(&config.to_toml(), "resolved.toml", &[]);
            assert_eq!(again.expect("a resolved configuration reads back"), config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
