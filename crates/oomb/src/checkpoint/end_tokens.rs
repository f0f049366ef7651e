//! Which tokens end a text, as a checkpoint folder says. It must not know who generates.

use super::{CONFIG, Error, Result};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::Path;

/// Overrides `config.json` where both are there.
const GENERATION: &str = "generation_config.json";

/// `eos_token_id` of `generation_config.json`, or else of `config.json`: a number or a list; none where neither says.
///
/// # Errors
/// If a file cannot be read, is not JSON, or says something else.
pub fn end_tokens(folder: &Path) -> Result<Vec<u32>> {
    for name in [GENERATION, CONFIG] {
        let path = folder.join(name);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::Io { action: "read", path, source }),
        };
        let wrong = |detail: String| Error::damaged(&path, detail);
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        let Some(tokens) = value.get("eos_token_id").filter(|tokens| !tokens.is_null()) else { continue };
        let listed: Option<Vec<u32>> = match tokens {
            Value::Array(tokens) => tokens.iter().map(token).collect(),
            one => token(one).map(|id| vec![id]),
        };
        return listed.ok_or_else(|| wrong(format!("eos_token_id: wanted a token id or a list of them, got {tokens}")));
    }
    Ok(Vec::new())
}

fn token(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
