//! Opens a checkpoint folder, checks every tensor against `config.json`, and reads values by name. It must not know where
//! values go.

use super::header::{self, Entry, FileType};
use super::{CONFIG, Error, INDEX, Result, SINGLE};
use crate::model::config::ModelConfig;
use crate::model::families::from_config_json;
use crate::model::params::param_specs;
use half::{bf16, f16};
use oomb_device::HostData;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A Hugging Face checkpoint whose tensors are known to be those of its configuration.
pub struct Checkpoint {
    folder: PathBuf,
    config: ModelConfig,
    config_json: Value,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Located>,
}

/// A tensor and the file that holds it.
struct Located {
    file: usize,
    entry: Entry,
}

/// The values of a tensor in the type that the checkpoint has them in.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// IEEE half precision.
    F16(Vec<f16>),
}

impl Values {
    /// Borrowed, for an upload.
    pub fn as_host(&self) -> HostData<'_> {
        match self {
            Self::F32(values) => HostData::F32(values),
            Self::Bf16(values) => HostData::Bf16(values),
            Self::F16(values) => HostData::F16(values),
        }
    }

    /// Widened; exact.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }
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
        let (files, tensors) = locate(folder)?;
        let checkpoint = Self { folder: folder.to_owned(), config, config_json, files, tensors };
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
        &self.located(name).entry.shape
    }

    /// Length of a tensor in its file.
    ///
    /// # Panics
    /// If `name` is not a source of one of the model's parameters.
    pub fn tensor_bytes(&self, name: &str) -> u64 {
        let bytes = &self.located(name).entry.bytes;
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
        let entry = &self.located(name).entry;
        let len: usize = entry.shape.iter().product();
        Ok(match entry.file_type {
            FileType::F32 => Values::F32(self.fill(name, vec![0.0; len])?),
            FileType::Bf16 => Values::Bf16(self.fill(name, vec![bf16::ZERO; len])?),
            FileType::F16 => Values::F16(self.fill(name, vec![f16::ZERO; len])?),
            FileType::Other(_) => unreachable!("refused when the checkpoint was opened"),
        })
    }

    fn located(&self, name: &str) -> &Located {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name} is no tensor of {}", self.folder.display()))
    }

    /// Safetensors are little-endian, as is every machine this runs on.
    fn fill<T: bytemuck::Pod>(&self, name: &str, mut values: Vec<T>) -> Result<Vec<T>> {
        let located = self.located(name);
        let (path, file) = &self.files[located.file];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        file.read_exact_at(bytes, located.entry.bytes.start).map_err(Error::io("read", path))?;
        Ok(values)
    }

    fn check(&self) -> Result<()> {
        let mut wanted: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for spec in param_specs(&self.config) {
            for (name, rows) in spec.sources {
                let shape = std::iter::once(rows.len()).chain(spec.shape[1..].iter().copied()).collect();
                wanted.insert(name, shape);
            }
        }
        let (mut missing, mut shapes, mut types) = (vec![], vec![], vec![]);
        for (name, shape) in &wanted {
            match self.tensors.get(name).map(|located| &located.entry) {
                None if name == HEAD => missing.push(format!("{HEAD} {shape:?} (tie_word_embeddings is not true)")),
                None => missing.push(format!("{name} {shape:?}")),
                Some(entry) if entry.shape != *shape => shapes.push(format!("{name} (wanted {shape:?}, got {:?})", entry.shape)),
                Some(entry) if entry.file_type.element_bytes().is_none() => {
                    types.push(format!("{name} (wanted F32, BF16 or F16, got {})", entry.file_type.name()));
                }
                Some(_) => {}
            }
        }
        let mut extra = vec![];
        for name in self.tensors.keys().filter(|name| !wanted.contains_key(*name)) {
            if !self.is_harmless(name)? {
                let hint = if name == HEAD { " (not the embedding, though tie_word_embeddings is true)" } else { "" };
                extra.push(format!("{name} {:?}{hint}", self.shape(name)));
            }
        }
        let kinds =
            [("missing", missing), ("of another shape", shapes), ("of another type", types), ("not of this model", extra)];
        let problems: Vec<String> = kinds.iter().filter(|(_, names)| !names.is_empty()).map(|(kind, n)| list(kind, n)).collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Mismatch { folder: self.folder.clone(), problems: problems.join("\n") })
    }

    /// Frequencies that old checkpoints store; a head that repeats the tied embedding.
    fn is_harmless(&self, name: &str) -> Result<bool> {
        if name.ends_with(".rotary_emb.inv_freq") {
            return Ok(true);
        }
        if name != HEAD || !self.config.tied_embeddings || !self.tensors.contains_key(EMBEDDING) {
            return Ok(false);
        }
        let (head, embedding) = (&self.located(name).entry, &self.located(EMBEDDING).entry);
        if head.shape != embedding.shape
            || head.file_type.element_bytes().is_none()
            || embedding.file_type.element_bytes().is_none()
        {
            return Ok(false);
        }
        Ok(self.tensor(name)? == self.tensor(EMBEDDING)?)
    }
}

fn list(kind: &str, names: &[String]) -> String {
    const SHOWN: usize = 5;
    let more = if names.len() > SHOWN { format!(", and {} more", names.len() - SHOWN) } else { String::new() };
    format!("  {} {kind}: {}{more}", names.len(), names[..names.len().min(SHOWN)].join(", "))
}

fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&text).map_err(|error| Error::damaged(path, format!("it is not JSON: {error}")))
}

type Files = (Vec<(PathBuf, File)>, BTreeMap<String, Located>);

/// Opens the weight files and indexes their tensors.
fn locate(folder: &Path) -> Result<Files> {
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
    let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
    for name in names {
        let path = folder.join(name);
        let file = File::open(&path).map_err(Error::io("read", &path))?;
        for entry in header::read(&path, &file)? {
            if let Some(Located { file, .. }) = tensors.get(&entry.name) {
                let (other, _): &(PathBuf, File) = &files[*file];
                return Err(Error::damaged(&path, format!("it has {} again, after {}", entry.name, other.display())));
            }
            tensors.insert(entry.name.clone(), Located { file: files.len(), entry });
        }
        files.push((path, file));
    }
    for (tensor, shard) in map.iter().flatten() {
        if tensors.get(tensor).is_none_or(|located| files[located.file].0 != folder.join(shard)) {
            return Err(Error::damaged(&index_path, format!("it says that {tensor} is in {shard}, where it is not")));
        }
    }
    Ok((files, tensors))
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
