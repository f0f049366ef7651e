//! Typed access to the keys of a JSON object, with errors that say key, wanted and got. It must not know which keys exist.

use super::{ConfigError, Result};
use serde_json::{Map, Value};

/// A JSON object and the prefix under which its keys are reported. A key that is null counts as absent.
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Self { map, prefix }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The key is there, if only as null.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(super) fn dotted(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(super) fn wrong(&self, key: &str, wanted: impl Into<String>, got: impl Into<String>) -> ConfigError {
        ConfigError::Wrong { key: self.dotted(key), wanted: wanted.into(), got: got.into() }
    }

    pub(super) fn unsupported(&self, key: &str, got: impl Into<String>, advice: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported { key: self.dotted(key), got: got.into(), advice: advice.into() }
    }

    fn missing(&self, key: &str, wanted: &str) -> ConfigError {
        ConfigError::Missing { key: self.dotted(key), wanted: wanted.into() }
    }

    fn typed<T>(&self, key: &str, wanted: &str, convert: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.wrong(key, wanted, shown(value))),
        }
    }

    pub(super) fn optional_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn optional_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        // 2^32: no dimension of a model is larger, and products of two fit in 64 bits.
        let convert = |value: &Value| value.as_u64().filter(|&n| n > 0 && n < 1 << 32).map(|n| n as usize);
        self.typed(key, "a positive whole number", convert)
    }

    pub(super) fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a positive number", |value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    pub(super) fn count(&self, key: &str) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key, "a positive whole number"))
    }

    pub(super) fn positive(&self, key: &str) -> Result<f64> {
        self.optional_positive(key)?.ok_or_else(|| self.missing(key, "a positive number"))
    }

    /// A switch that must be off.
    pub(super) fn refuse_true(&self, key: &str, advice: &str) -> Result<()> {
        match self.optional_bool(key)? {
            Some(true) => Err(self.unsupported(key, "true", advice)),
            _ => Ok(()),
        }
    }
}

/// A JSON value in an error message, shortened.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
