//! Opens a checkpoint folder, checks every tensor against `config.json`, and reads values by name. It must not know where
//! values go.

use super::header::Entry;
use super::values::{Tensors, Values};
use super::{CONFIG, Error, INDEX, Result, SINGLE};
use crate::model::config::ModelConfig;
use crate::model::families::from_config_json;
use crate::model::params::param_specs;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A Hugging Face checkpoint whose tensors are known to be those of its configuration.
pub struct Checkpoint {
    folder: PathBuf,
    config: ModelConfig,
    config_json: Value,
    tensors: Tensors,
}

impl Checkpoint {
    /// Reads `config.json` and the headers of the weight files (one `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names), and checks that exactly the model's tensors are there, in shape and in a
    /// type that is read (F32, BF16, F16). Reads no weights, except where a tied model carries a head as well.
    ///
    /// # Errors
    /// Everything that can be wrong, before any value is used; names come with what was wanted and what is there.
    pub fn open(folder: &Path) -> Result<Self> {
        let config_path = folder.join(CONFIG);
        if !config_path.is_file() {
            let problem = if folder.is_dir() { "there is no config.json" } else { "there is no such folder" };
            return Err(Error::NotACheckpoint { folder: folder.to_owned(), problem: problem.to_owned() });
        }
        let config_json = read_json(&config_path)?;
        let config = from_config_json(&config_json).map_err(|source| Error::Config { path: config_path, source })?;
        let checkpoint = Self { folder: folder.to_owned(), config, config_json, tensors: locate(folder)? };
        checkpoint.check()?;
        Ok(checkpoint)
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// `config.json` as it is, for [`super::write`] to keep what the model does not know.
    pub fn config_json(&self) -> &Value {
        &self.config_json
    }

    /// Shape of a tensor.
    ///
    /// # Panics
    /// If `name` is not a source of one of the model's parameters.
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.entry(name).shape
    }

    /// Length of a tensor in its file.
    ///
    /// # Panics
    /// If `name` is not a source of one of the model's parameters.
    pub fn tensor_bytes(&self, name: &str) -> u64 {
        let bytes = &self.entry(name).bytes;
        bytes.end - bytes.start
    }

    /// Reads the values of a tensor.
    ///
    /// # Errors
    /// If the file cannot be read, or has shrunk since it was opened.
    ///
    /// # Panics
    /// If `name` is not a source of one of the model's parameters.
    pub fn tensor(&self, name: &str) -> Result<Values> {
        assert!(self.tensors.get(name).is_some(), "{name} is no tensor of {}", self.folder.display());
        self.tensors.values(name)
    }

    fn entry(&self, name: &str) -> &Entry {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name} is no tensor of {}", self.folder.display()))
    }

    fn check(&self) -> Result<()> {
        let mut wanted: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for spec in param_specs(&self.config) {
            for (name, rows) in spec.sources {
                let shape = std::iter::once(rows.len()).chain(spec.shape[1..].iter().copied()).collect();
                wanted.insert(name, shape);
            }
        }
        let mut differences = self.tensors.compare(&wanted);
        for missing in differences.missing.iter_mut().filter(|missing| missing.starts_with(HEAD)) {
            missing.push_str(" (tie_word_embeddings is not true)");
        }
        let mut extra = vec![];
        for name in differences.extra {
            if !self.is_harmless(&name)? {
                let hint = if name == HEAD { " (not the embedding, though tie_word_embeddings is true)" } else { "" };
                extra.push(format!("{name} {:?}{hint}", self.shape(&name)));
            }
        }
        differences.extra = extra;
        let problems = differences.problems();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Mismatch { folder: self.folder.clone(), problems })
    }

    /// Frequencies that old checkpoints store; a head that repeats the tied embedding.
    fn is_harmless(&self, name: &str) -> Result<bool> {
        if name.ends_with(".rotary_emb.inv_freq") {
            return Ok(true);
        }
        if name != HEAD || !self.config.tied_embeddings || self.tensors.get(EMBEDDING).is_none() {
            return Ok(false);
        }
        let (head, embedding) = (self.entry(name), self.entry(EMBEDDING));
        if head.shape != embedding.shape || !head.file_type.is_weight() || !embedding.file_type.is_weight() {
            return Ok(false);
        }
        Ok(self.tensor(name)? == self.tensor(EMBEDDING)?)
    }
}

pub(super) fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&text).map_err(|error| Error::damaged(path, format!("it is not JSON: {error}")))
}

/// Opens the weight files and indexes their tensors.
fn locate(folder: &Path) -> Result<Tensors> {
    let index_path = folder.join(INDEX);
    let map = if folder.join(SINGLE).is_file() {
        None
    } else if index_path.is_file() {
        Some(weight_map(&index_path)?)
    } else {
        let problem = format!("there is neither {SINGLE} nor {INDEX}; weights in other formats must be converted to safetensors");
        return Err(Error::NotACheckpoint { folder: folder.to_owned(), problem });
    };
    let names: BTreeSet<&str> = match &map {
        None => BTreeSet::from([SINGLE]),
        Some(map) => map.values().map(String::as_str).collect(),
    };
    let mut tensors = Tensors::default();
    for name in names {
        tensors.add(folder.join(name))?;
    }
    for (tensor, shard) in map.iter().flatten() {
        if tensors.file_of(tensor).is_none_or(|file| file != folder.join(shard)) {
            return Err(Error::damaged(&index_path, format!("it says that {tensor} is in {shard}, where it is not")));
        }
    }
    Ok(tensors)
}

/// Tensor name to shard name.
fn weight_map(path: &Path) -> Result<BTreeMap<String, String>> {
    let index = read_json(path)?;
    let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone())
        .map_err(|error| Error::damaged(path, format!("weight_map must map tensor names to file names: {error}")))?;
    match map.values().find(|shard| Path::new(shard).file_name().is_none_or(|name| name != shard.as_str())) {
        Some(shard) => Err(Error::damaged(path, format!("shard \"{shard}\" is not a file name"))),
        None => Ok(map),
    }
}
