//! Writes a model as a Hugging Face folder, one parameter in memory at a time. It must not know where the values come from.
//!
//! The folder appears under its name complete or not at all: it is written beside it, synced, and renamed.

use super::header::FileType;
use super::tensors::{Sum, TensorWriter};
use super::{CONFIG, Error, INDEX, Result, SINGLE};
use crate::model::config::ModelConfig;
use crate::model::families::to_config_json;
use crate::model::params::{ParamSpec, param_specs};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};

/// As transformers does.
pub const DEFAULT_MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Files beside the weights that say how text becomes tokens and how to generate.
const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// Type of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Rounded to nearest.
    Bf16,
    /// As they are.
    F32,
}

impl WeightType {
    pub(super) fn file_type(self) -> FileType {
        match self {
            Self::Bf16 => FileType::Bf16,
            Self::F32 => FileType::F32,
        }
    }

    fn torch_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}

/// What to write beside the values.
#[derive(Debug, Clone)]
pub struct Export<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// `config.json` of the checkpoint that training started from, whose other keys are kept.
    pub config_json: Option<&'a Value>,
    /// Files to copy along, as from [`tokenizer_files`].
    pub files: &'a [PathBuf],
    /// Type of the weights.
    pub weights: WeightType,
    /// No weight file is larger, unless a single tensor is.
    pub max_shard_bytes: u64,
}

/// The tokenizer's files in a checkpoint folder, those that there are.
pub fn tokenizer_files(folder: &Path) -> Vec<PathBuf> {
    TOKENIZER_FILES.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// Writes the folder `out`. `values` returns the values of a parameter, row-major; it is called once for each of
/// [`param_specs`], in order.
///
/// # Errors
/// If `out` exists and is not an empty folder, if the disk refuses, or if `values` fails; `out` is then as it was.
///
/// # Panics
/// If `values` returns another number of values than the parameter has.
pub fn write(out: &Path, export: &Export<'_>, values: impl FnMut(&ParamSpec) -> Result<Vec<f32>>) -> Result<()> {
    write_summed(out, export, values).map(drop)
}

/// [`write`], returning the names of the weight files with their sums.
///
/// # Errors
/// As [`write`].
///
/// # Panics
/// As [`write`].
pub fn write_summed(
    out: &Path,
    export: &Export<'_>,
    values: impl FnMut(&ParamSpec) -> Result<Vec<f32>>,
) -> Result<Vec<(PathBuf, Sum)>> {
    in_new_folder(out, |folder| write_into(folder, export, values))
}

/// Makes the folder `out` with what `fill` puts into it: complete, or not at all.
pub(super) fn in_new_folder<T>(out: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    check_free(out)?;
    let parent = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = out.file_name().ok_or(Error::Occupied { path: out.to_owned(), problem: "is not a name for a new folder" })?;
    std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
    let partial = parent.join(format!(".{}.partial-{}", name.to_string_lossy(), std::process::id()));
    std::fs::create_dir(&partial).map_err(Error::io("create", &partial))?;
    let written = fill(&partial).and_then(|filled| {
        sync(&partial)?;
        std::fs::rename(&partial, out).map_err(Error::io("rename the finished export to", out))?;
        sync(parent)?;
        Ok(filled)
    });
    if written.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_dir_all(&partial);
    }
    written
}

/// Nothing there, or an empty folder.
fn check_free(out: &Path) -> Result<()> {
    let occupied = |problem| Err(Error::Occupied { path: out.to_owned(), problem });
    match std::fs::read_dir(out) {
        Ok(mut entries) => match entries.next() {
            Some(_) => occupied("exists and is not empty: choose another folder, or remove it"),
            None => Ok(()),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => occupied("is a file: choose another name"),
        Err(error) => Err(Error::io("read", out)(error)),
    }
}

fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("sync", path))
}

fn write_into(
    folder: &Path,
    export: &Export<'_>,
    mut values: impl FnMut(&ParamSpec) -> Result<Vec<f32>>,
) -> Result<Vec<(PathBuf, Sum)>> {
    let specs = param_specs(export.config);
    let tensors: Vec<Tensor> = specs.iter().flat_map(tensors_of).collect();
    let shards = plan_shards(&tensors, export);
    let config_json = to_config_json(export.config, export.config_json, export.weights.torch_name());
    write_json(&folder.join(CONFIG), &config_json)?;
    if shards.len() > 1 {
        write_json(&folder.join(INDEX), &index_json(&tensors, &shards, export.weights))?;
    }
    for path in export.files {
        let copy = folder.join(path.file_name().unwrap_or(path.as_os_str()));
        std::fs::copy(path, &copy).map_err(Error::io("copy", path))?;
        sync(&copy)?;
    }
    let mut shards = shards.iter();
    let mut open: Option<TensorWriter> = None;
    let mut sums = Vec::new();
    for spec in &specs {
        let values = values(spec)?;
        assert_eq!(values.len(), spec.len(), "values of {:?}", spec.id);
        let row_len = spec.len() / spec.shape[0];
        for (_, rows) in &spec.sources {
            if open.as_ref().is_none_or(|shard| shard.remaining() == 0) {
                finish(open.take(), &mut sums)?;
                let shard = shards.next().expect("the shards hold every tensor");
                open = Some(shard.create(folder, &tensors, export.weights)?);
            }
            let shard = open.as_mut().expect("just opened");
            shard.push(&values[rows.start * row_len..rows.end * row_len])?;
        }
    }
    finish(open, &mut sums)?;
    Ok(sums)
}

/// A tensor as the checkpoint names it.
struct Tensor {
    name: String,
    shape: Vec<usize>,
}

fn tensors_of(spec: &ParamSpec) -> impl Iterator<Item = Tensor> {
    spec.sources.iter().map(|(name, rows)| Tensor {
        name: name.clone(),
        shape: std::iter::once(rows.len()).chain(spec.shape[1..].iter().copied()).collect(),
    })
}

/// One weight file: its name, and which of all tensors it holds.
struct Shard {
    file_name: String,
    tensors: std::ops::Range<usize>,
}

impl Shard {
    fn create(&self, folder: &Path, tensors: &[Tensor], weights: WeightType) -> Result<TensorWriter> {
        let held = tensors[self.tensors.clone()].iter();
        let held: Vec<(&str, &[usize])> = held.map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
        TensorWriter::create(&folder.join(&self.file_name), &held, weights)
    }
}

fn tensor_bytes(tensor: &Tensor, weights: WeightType) -> u64 {
    let element_bytes = weights.file_type().element_bytes().expect("a type that is read");
    tensor.shape.iter().product::<usize>() as u64 * element_bytes
}

fn plan_shards(tensors: &[Tensor], export: &Export<'_>) -> Vec<Shard> {
    let (mut ranges, mut start, mut shard_bytes) = (Vec::new(), 0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = tensor_bytes(tensor, export.weights);
        if shard_bytes > 0 && shard_bytes + bytes > export.max_shard_bytes {
            ranges.push(start..i);
            (start, shard_bytes) = (i, 0);
        }
        shard_bytes += bytes;
    }
    ranges.push(start..tensors.len());
    let count = ranges.len();
    let file_name = |i: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    ranges.into_iter().enumerate().map(|(i, tensors)| Shard { file_name: file_name(i), tensors }).collect()
}

fn index_json(tensors: &[Tensor], shards: &[Shard], weights: WeightType) -> Value {
    let total_size: u64 = tensors.iter().map(|tensor| tensor_bytes(tensor, weights)).sum();
    let mut map = Map::new();
    for shard in shards {
        for tensor in &tensors[shard.tensors.clone()] {
            map.insert(tensor.name.clone(), json!(shard.file_name));
        }
    }
    json!({"metadata": {"total_size": total_size}, "weight_map": map})
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    std::fs::write(path, format!("{value:#}\n")).map_err(Error::io("write", path))?;
    sync(path)
}

fn finish(shard: Option<TensorWriter>, sums: &mut Vec<(PathBuf, Sum)>) -> Result<()> {
    let Some(shard) = shard else { return Ok(()) };
    let (path, sum) = shard.finish()?;
    sums.push((path.file_name().unwrap_or(path.as_os_str()).into(), sum));
    Ok(())
}
