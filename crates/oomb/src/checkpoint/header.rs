//! The header of a safetensors file: eight bytes of length, JSON, then the tensors' bytes. It must not know models.

use super::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

/// The safetensors format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;
/// How the text that stands for a file in a repository begins.
const LFS_POINTER: &[u8; 8] = b"version ";

/// Types that are read; others appear by name, to be refused by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FileType {
    F32,
    Bf16,
    F16,
    U8,
    Other(String),
}

impl FileType {
    fn parse(name: &str) -> Self {
        match name {
            "F32" => Self::F32,
            "BF16" => Self::Bf16,
            "F16" => Self::F16,
            "U8" => Self::U8,
            other => Self::Other(other.to_owned()),
        }
    }

    pub(super) fn name(&self) -> &str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::U8 => "U8",
            Self::Other(name) => name,
        }
    }

    /// Whether weights of this type are read.
    pub(super) fn is_weight(&self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16)
    }

    /// `None` where the type is not read.
    pub(super) fn element_bytes(&self) -> Option<u64> {
        match self {
            Self::F32 => Some(4),
            Self::Bf16 | Self::F16 => Some(2),
            Self::U8 => Some(1),
            Self::Other(_) => None,
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub name: String,
    pub file_type: FileType,
    pub shape: Vec<usize>,
    /// Bytes in the file, from its start.
    pub bytes: Range<u64>,
}

/// Reads the header and checks that every tensor lies within the file with as many bytes as its shape needs.
pub(super) fn read(path: &Path, file: &File) -> Result<Vec<Entry>> {
    let file_bytes = file.metadata().map_err(Error::io("read", path))?.len();
    let mut reader = file;
    let mut length = [0; LENGTH_BYTES as usize];
    if file_bytes < LENGTH_BYTES {
        return Err(Error::damaged(path, format!("it has {file_bytes} bytes, a safetensors file has at least 8")));
    }
    reader.read_exact(&mut length).map_err(Error::io("read", path))?;
    if &length == LFS_POINTER {
        return Err(Error::damaged(path, "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"));
    }
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - LENGTH_BYTES {
        let problem = format!("its header claims {header_bytes} bytes of a file of {file_bytes}: truncated, or not safetensors");
        return Err(Error::damaged(path, problem));
    }
    let mut text = vec![0; header_bytes as usize];
    reader.read_exact(&mut text).map_err(Error::io("read", path))?;
    let header: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|error| Error::damaged(path, format!("its header is not JSON: {error}")))?;
    let start = LENGTH_BYTES + header_bytes;
    let mut entries = Vec::with_capacity(header.len());
    for (name, value) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let entry = entry(name, value, start)
            .ok_or_else(|| Error::damaged(path, format!("its header describes {name} as {value}, which makes no sense")))?;
        entries.push(entry);
    }
    entries.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    let mut end = start;
    for entry in &entries {
        if entry.bytes.start != end {
            let problem = format!("{} starts at byte {}, wanted {end}: tensors follow each other", entry.name, entry.bytes.start);
            return Err(Error::damaged(path, problem));
        }
        end = entry.bytes.end;
    }
    if end != file_bytes {
        let verdict = if end > file_bytes { "it is truncated" } else { "there is more than its header describes" };
        return Err(Error::damaged(path, format!("its tensors end at byte {end}, the file at byte {file_bytes}: {verdict}")));
    }
    Ok(entries)
}

fn entry(name: &str, value: &Value, start: u64) -> Option<Entry> {
    let file_type = FileType::parse(value["dtype"].as_str()?);
    let shape: Vec<usize> =
        value["shape"].as_array()?.iter().map(|dim| dim.as_u64().map(|dim| dim as usize)).collect::<Option<_>>()?;
    let offsets: Vec<u64> = value["data_offsets"].as_array()?.iter().map(Value::as_u64).collect::<Option<_>>()?;
    let &[begin, end] = offsets.as_slice() else { return None };
    let elements = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim as u64))?;
    let num_bytes = end.checked_sub(begin)?;
    if let Some(element_bytes) = file_type.element_bytes()
        && num_bytes != elements.checked_mul(element_bytes)?
    {
        return None;
    }
    let bytes = start.checked_add(begin)?..start.checked_add(end)?;
    Some(Entry { name: name.to_owned(), file_type, shape, bytes })
}

/// The first bytes of a file that holds `tensors` (name, shape, type) in that order, without gaps. Padded with
/// spaces, so that the data start at a multiple of eight bytes.
pub(super) fn build(tensors: &[(&str, &[usize], FileType)]) -> Vec<u8> {
    let mut header = Map::new();
    // transformers refuses files without it.
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut begin = 0;
    for (name, shape, file_type) in tensors {
        let element_bytes = file_type.element_bytes().expect("only types that are read are written");
        let end = begin + shape.iter().product::<usize>() as u64 * element_bytes;
        header.insert((*name).into(), json!({"dtype": file_type.name(), "shape": shape, "data_offsets": [begin, end]}));
        begin = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    bytes
}
