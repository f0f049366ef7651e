//! From TOML values to typed settings: unknown keys, wrong types and overrides are refused here. It must not know what a
//! setting means, or how two of them relate.

use super::error::{Error, Result};
use super::size::{parse_bytes, parse_tokens};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Every section and every key there is. Reading a key that is not listed is our own mistake and panics.
pub(super) const KEYS: [(&str, &[&str]); 7] = [
    ("model", &["preset", "path", "rope_scaling"]),
    ("lora", &["path", "rank", "alpha", "rslora", "target_modules", "dropout"]),
    (
        "data",
        &[
            "train",
            "sources",
            "validation",
            "sequence_tokens",
            "tokenizer",
            "sequences_per_step",
            "packing",
            "long_documents",
            "format",
            "field",
            "chat_template",
            "loss_on",
            "malformed",
        ],
    ),
    ("schedule", &["chunk_tokens", "keep", "keep_budget", "keep_host_budget", "loss_tile_tokens"]),
    ("kv", &["page_tokens", "selection", "grad_dtype", "device_budget", "group_pages", "prefetch_groups"]),
    (
        "optimizer",
        &[
            "name",
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "decay_norms_and_biases",
            "clip_norm",
            "schedule",
            "warmup_steps",
            "min_lr",
            "state_dtype",
            "master_weights",
            "placement",
        ],
    ),
    (
        "run",
        &[
            "out",
            "steps",
            "seed",
            "device",
            "compute_dtype",
            "threads",
            "log_every",
            "tensorboard",
            "validate_every",
            "validation_sequences",
            "checkpoint_every",
            "keep_checkpoints",
            "on_not_finite",
        ],
    ),
];

/// A value that is not what a setting takes.
pub(super) enum Refusal {
    /// Not of the type that [`Setting::WANTED`] names.
    WrongType,
    /// Recognised, and refused for this reason.
    Because(String),
}

/// A type that a setting can have.
pub(super) trait Setting: Sized {
    /// Completes "must be …".
    const WANTED: &'static str;
    /// Reads the value.
    fn read(value: &Value) -> std::result::Result<Self, Refusal>;
}

/// The whole document with where each key came from.
pub(super) struct Document {
    table: Table,
    file: String,
    overridden: HashSet<String>,
}

impl Document {
    /// Parses `text`, applies the overrides (`section.key=value`) and refuses unknown sections and keys.
    pub(super) fn parse(text: &str, file: &str, overrides: &[String]) -> Result<Self> {
        let table: Table =
            text.parse().map_err(|e: toml::de::Error| Error::Syntax { origin: file.to_owned(), detail: e.to_string() })?;
        let mut document = Self { table, file: file.to_owned(), overridden: HashSet::new() };
        for text in overrides {
            document.apply(text)?;
        }
        document.refuse_unknown()?;
        Ok(document)
    }

    fn apply(&mut self, text: &str) -> Result<()> {
        let wrong = |problem: String| Error::Override { text: text.to_owned(), problem };
        let (path, value) =
            text.split_once('=').ok_or_else(|| wrong("wants section.key=value, for example run.steps=100".to_owned()))?;
        let mut parts: Vec<&str> = path.trim().split('.').map(str::trim).collect();
        if parts.len() < 2 {
            let place = KEYS.iter().find(|(_, keys)| keys.contains(&parts[0]));
            return Err(wrong(match place {
                Some((section, _)) => format!("wants section.key=value; write {section}.{}", text.trim()),
                None => "wants section.key=value, for example run.steps=100".to_owned(),
            }));
        }
        let last = parts.pop().unwrap_or_default();
        self.overridden.insert(path.trim().split('.').take(2).map(str::trim).collect::<Vec<_>>().join("."));
        let mut table = &mut self.table;
        for part in parts {
            let entry = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
            table = entry.as_table_mut().ok_or_else(|| wrong(format!("{part} is a value, not a section")))?;
        }
        table.insert(last.to_owned(), override_value(value.trim()));
        Ok(())
    }

    fn refuse_unknown(&self) -> Result<()> {
        for (name, value) in &self.table {
            let Some((section, keys)) = KEYS.iter().find(|(section, _)| section == name) else {
                let origin = self.table.get(name).and_then(Value::as_table).and_then(|t| t.keys().next());
                let origin = self.origin(&format!("{name}.{}", origin.map_or("", String::as_str)));
                return Err(unknown_section(origin, name, value));
            };
            let Some(table) = value.as_table() else {
                return Err(Error::WrongType {
                    origin: self.file.clone(),
                    key: (*section).to_owned(),
                    wanted: format!("a section: write [{section}] and its keys below it"),
                    got: describe(value),
                });
            };
            if let Some(key) = table.keys().find(|key| !keys.contains(&key.as_str())) {
                return Err(unknown_key(self.origin(&format!("{section}.{key}")), section, keys, key));
            }
        }
        Ok(())
    }

    /// The file, or `--set` where the key was overridden.
    pub(super) fn origin(&self, key: &str) -> String {
        if self.overridden.contains(key) { format!("--set {key}") } else { self.file.clone() }
    }

    /// One section, empty where the document has none.
    pub(super) fn section(&self, name: &'static str) -> Section<'_> {
        let keys = KEYS.iter().find(|(section, _)| *section == name).map(|(_, keys)| *keys);
        let keys = keys.expect("only sections listed in KEYS are read");
        Section { document: self, name, keys, table: self.table.get(name).and_then(Value::as_table) }
    }

    /// The error for a value that is out of range or at odds with another.
    pub(super) fn invalid(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Invalid { origin: self.origin(key), key: key.to_owned(), problem: problem.into() }
    }
}

/// One section of the document.
pub(super) struct Section<'a> {
    document: &'a Document,
    name: &'static str,
    keys: &'static [&'static str],
    table: Option<&'a Table>,
}

impl Section<'_> {
    /// The document has it, if only its heading.
    pub(super) fn is_given(&self) -> bool {
        self.table.is_some()
    }

    /// The setting, if it is given.
    pub(super) fn optional<T: Setting>(&self, key: &'static str) -> Result<Option<T>> {
        assert!(self.keys.contains(&key), "{}.{key} is not listed in KEYS", self.name);
        let Some(value) = self.table.and_then(|table| table.get(key)) else { return Ok(None) };
        let full = format!("{}.{key}", self.name);
        T::read(value).map(Some).map_err(|refusal| match refusal {
            Refusal::WrongType => Error::WrongType {
                origin: self.document.origin(&full),
                key: full,
                wanted: T::WANTED.to_owned(),
                got: describe(value),
            },
            Refusal::Because(problem) => self.document.invalid(&full, problem),
        })
    }

    /// The setting, or its default.
    pub(super) fn or<T: Setting>(&self, key: &'static str, default: T) -> Result<T> {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    /// The setting, or an error that says what to write.
    pub(super) fn required<T: Setting>(&self, key: &'static str, hint: &'static str) -> Result<T> {
        self.optional(key)?.ok_or_else(|| Error::Missing {
            origin: self.document.file.clone(),
            key: format!("{}.{key}", self.name),
            hint,
        })
    }
}

/// The value of an override: TOML where it is TOML, else the text itself.
fn override_value(text: &str) -> Value {
    let parsed = format!("value = {text}").parse::<Table>().ok();
    match parsed {
        Some(mut table) if table.len() == 1 => table.remove("value").unwrap_or_else(|| Value::String(text.to_owned())),
        _ => Value::String(text.to_owned()),
    }
}

fn unknown_section(origin: String, name: &str, value: &Value) -> Error {
    let what = if value.is_table() { format!("section [{name}]") } else { format!("key `{name}` outside any section") };
    let place = KEYS.iter().find(|(_, keys)| keys.contains(&name));
    let hint = match (place, nearest(name, KEYS.iter().map(|(section, _)| *section))) {
        (Some((section, _)), _) => format!("; `{name}` belongs in [{section}]"),
        (None, Some(section)) => format!("; did you mean [{section}]?"),
        (None, None) => format!("; the sections are {}", KEYS.map(|(section, _)| section).join(", ")),
    };
    Error::Unknown { origin, what, hint }
}

fn unknown_key(origin: String, section: &str, keys: &[&str], key: &str) -> Error {
    let elsewhere = KEYS.iter().find(|(_, keys)| keys.contains(&key));
    let hint = match (elsewhere, nearest(key, keys.iter().copied())) {
        (Some((other, _)), _) => format!("; `{key}` belongs in [{other}]"),
        (None, Some(near)) => format!("; did you mean `{near}`?"),
        (None, None) => {
            let all = KEYS.iter().flat_map(|(s, keys)| keys.iter().map(move |k| (*s, *k)));
            let near = nearest(key, all.clone().map(|(_, k)| k));
            match near.and_then(|near| all.clone().find(|(_, k)| *k == near)) {
                Some((other, near)) => format!("; did you mean `{near}` of [{other}]?"),
                None => format!("; [{section}] has {}", keys.join(", ")),
            }
        }
    };
    Error::Unknown { origin, what: format!("key `{section}.{key}`"), hint }
}

/// The most similar name, where one is similar enough to be a misspelling.
pub fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    names
        .map(|candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= 0.55)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// "the integer 5", as an error names what it got.
fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the string {text:?}"),
        Value::Integer(number) => format!("the integer {number}"),
        Value::Float(number) => format!("the number {number}"),
        Value::Boolean(value) => format!("the boolean {value}"),
        Value::Datetime(value) => format!("the date {value}"),
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Table(_) => "a section or inline table".to_owned(),
    }
}

/// A number of tokens.
pub(super) struct Tokens(pub(super) usize);

/// A number of bytes.
pub(super) struct NumBytes(pub(super) u64);

/// One path or several.
pub(super) struct Paths(pub(super) Vec<PathBuf>);

impl Setting for Tokens {
    const WANTED: &'static str = "a number of tokens (32768, \"64K\", \"1M\")";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        let tokens = match value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::String(text) => parse_tokens(text),
            _ => None,
        };
        tokens.and_then(|tokens| usize::try_from(tokens).ok()).map(Self).ok_or(Refusal::WrongType)
    }
}

impl Setting for NumBytes {
    const WANTED: &'static str = "a number of bytes (\"64MiB\", \"20GiB\")";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        let bytes = match value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::String(text) => parse_bytes(text),
            _ => None,
        };
        bytes.map(Self).ok_or(Refusal::WrongType)
    }
}

impl Setting for usize {
    const WANTED: &'static str = "a whole number, 0 or more";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        value.as_integer().and_then(|number| Self::try_from(number).ok()).ok_or(Refusal::WrongType)
    }
}

impl Setting for u64 {
    const WANTED: &'static str = "a whole number, 0 or more";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        value.as_integer().and_then(|number| Self::try_from(number).ok()).ok_or(Refusal::WrongType)
    }
}

impl Setting for f64 {
    const WANTED: &'static str = "a number";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        match value {
            Value::Float(number) => Ok(*number),
            Value::Integer(number) => Ok(*number as Self),
            _ => Err(Refusal::WrongType),
        }
    }
}

impl Setting for (f64, f64) {
    const WANTED: &'static str = "two numbers ([0.9, 0.95])";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        match value.as_array().map(Vec::as_slice) {
            Some([first, second]) => Ok((f64::read(first)?, f64::read(second)?)),
            _ => Err(Refusal::WrongType),
        }
    }
}

impl Setting for bool {
    const WANTED: &'static str = "true or false";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        value.as_bool().ok_or(Refusal::WrongType)
    }
}

impl Setting for String {
    const WANTED: &'static str = "a string";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        value.as_str().map(str::to_owned).ok_or(Refusal::WrongType)
    }
}

impl Setting for PathBuf {
    const WANTED: &'static str = "a path in quotes";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        match value.as_str() {
            Some("") => Err(Refusal::Because("is empty: write a path".to_owned())),
            Some(text) => Ok(Path::new(text).to_path_buf()),
            None => Err(Refusal::WrongType),
        }
    }
}

impl Setting for Paths {
    const WANTED: &'static str = "a path, or an array of paths, in quotes";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        match value {
            Value::Array(items) if items.is_empty() => Err(Refusal::Because("is empty: write at least one path".to_owned())),
            Value::Array(items) => items.iter().map(PathBuf::read).collect::<std::result::Result<_, _>>().map(Self),
            _ => Ok(Self(vec![PathBuf::read(value)?])),
        }
    }
}

impl Setting for Table {
    const WANTED: &'static str = "an inline table ({ rope_type = \"yarn\", factor = 4.0 })";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        value.as_table().cloned().ok_or(Refusal::WrongType)
    }
}

/// The word `auto`, or a value.
pub(super) struct OrAuto<T>(pub(super) Option<T>);

macro_rules! or_auto {
    ($type:ty, $wanted:literal) => {
        impl Setting for OrAuto<$type> {
            const WANTED: &'static str = $wanted;
            fn read(value: &Value) -> std::result::Result<Self, Refusal> {
                if value.as_str() == Some("auto") { Ok(Self(None)) } else { <$type>::read(value).map(|v| Self(Some(v))) }
            }
        }
    };
}

or_auto!(Tokens, "\"auto\" or a number of tokens (1024, \"4K\")");
or_auto!(NumBytes, "\"auto\" or a number of bytes (\"64MiB\", \"20GiB\")");
or_auto!(usize, "\"auto\" or a whole number");
