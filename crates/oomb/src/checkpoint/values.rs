//! The tensors of safetensors files by name: where each lies, how they compare with what was wanted, and their values. It must
//! not know models.

use super::header::{self, Entry, FileType};
use super::{Error, Result};
use half::{bf16, f16};
use oomb_device::HostData;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

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

/// A tensor and the file that holds it.
pub(super) struct Located {
    file: usize,
    pub entry: Entry,
}

/// Open files and where their tensors lie.
#[derive(Default)]
pub(super) struct Tensors {
    files: Vec<(PathBuf, File)>,
    by_name: BTreeMap<String, Located>,
}

/// How tensors differ from what was wanted: one text for each.
pub(super) struct Differences {
    /// Wanted and not there.
    pub missing: Vec<String>,
    /// Of another shape.
    pub shapes: Vec<String>,
    /// Of a type that is not read.
    pub types: Vec<String>,
    /// Names of those that nobody asked for.
    pub extra: Vec<String>,
}

impl Tensors {
    /// Opens one more file.
    pub(super) fn add(&mut self, path: PathBuf) -> Result<()> {
        let file = File::open(&path).map_err(Error::io("read", &path))?;
        for entry in header::read(&path, &file)? {
            if let Some(Located { file, .. }) = self.by_name.get(&entry.name) {
                let (other, _) = &self.files[*file];
                return Err(Error::damaged(&path, format!("it has {} again, after {}", entry.name, other.display())));
            }
            self.by_name.insert(entry.name.clone(), Located { file: self.files.len(), entry });
        }
        self.files.push((path, file));
        Ok(())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|located| &located.entry)
    }

    /// The file that holds a tensor.
    pub(super) fn file_of(&self, name: &str) -> Option<&Path> {
        self.by_name.get(name).map(|located| self.files[located.file].0.as_path())
    }

    /// Compares with names and shapes.
    pub(super) fn compare(&self, wanted: &BTreeMap<String, Vec<usize>>) -> Differences {
        let (mut missing, mut shapes, mut types) = (vec![], vec![], vec![]);
        for (name, shape) in wanted {
            match self.get(name) {
                None => missing.push(format!("{name} {shape:?}")),
                Some(entry) if entry.shape != *shape => shapes.push(format!("{name} (wanted {shape:?}, got {:?})", entry.shape)),
                Some(entry) if !entry.file_type.is_weight() => {
                    types.push(format!("{name} (wanted F32, BF16 or F16, got {})", entry.file_type.name()));
                }
                Some(_) => {}
            }
        }
        let extra = self.names().filter(|name| !wanted.contains_key(*name)).map(str::to_owned).collect();
        Differences { missing, shapes, types, extra }
    }

    /// Reads the values of a tensor, whose type is one that is read.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub(super) fn values(&self, name: &str) -> Result<Values> {
        let located = self.by_name.get(name).unwrap_or_else(|| panic!("there is no tensor {name}"));
        let len: usize = located.entry.shape.iter().product();
        Ok(match located.entry.file_type {
            FileType::F32 => Values::F32(self.fill(located, vec![0.0; len])?),
            FileType::Bf16 => Values::Bf16(self.fill(located, vec![bf16::ZERO; len])?),
            FileType::F16 => Values::F16(self.fill(located, vec![f16::ZERO; len])?),
            FileType::U8 | FileType::Other(_) => unreachable!("refused when the files were opened"),
        })
    }

    /// Safetensors are little-endian, as is every machine this runs on.
    fn fill<T: bytemuck::Pod>(&self, located: &Located, mut values: Vec<T>) -> Result<Vec<T>> {
        let (path, file) = &self.files[located.file];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        file.read_exact_at(bytes, located.entry.bytes.start).map_err(Error::io("read", path))?;
        Ok(values)
    }
}

impl Differences {
    /// One indented line for each kind, with up to five names; empty where there is none.
    pub(super) fn problems(&self) -> String {
        let kinds = [
            ("missing", &self.missing),
            ("of another shape", &self.shapes),
            ("of another type", &self.types),
            ("not of this model", &self.extra),
        ];
        let lines: Vec<String> = kinds.iter().filter(|(_, names)| !names.is_empty()).map(|(kind, n)| list(kind, n)).collect();
        lines.join("\n")
    }
}

fn list(kind: &str, names: &[String]) -> String {
    const SHOWN: usize = 5;
    let more = if names.len() > SHOWN { format!(", and {} more", names.len() - SHOWN) } else { String::new() };
    format!("  {} {kind}: {}{more}", names.len(), names[..names.len().min(SHOWN)].join(", "))
}
