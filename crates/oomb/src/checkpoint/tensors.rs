//! One safetensors file, tensor by tensor: written with a checksum on the way, read by name. It must not know what the
//! tensors are.

use super::header::{self, Entry, FileType};
use super::{Error, Result, WeightType};
use half::bf16;
use oomb_device::DType;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Length and CRC-32 of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Length.
    pub bytes: u64,
    /// Of all of it.
    pub crc32: u32,
}

/// A safetensors file being written.
pub struct TensorWriter {
    path: PathBuf,
    file: BufWriter<Summed>,
    weights: WeightType,
    remaining: usize,
}

impl TensorWriter {
    /// Creates `path` for `tensors` (name, shape), whose values follow in that order.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn create(path: &Path, tensors: &[(&str, &[usize])], weights: WeightType) -> Result<Self> {
        let typed: Vec<_> = tensors.iter().map(|&(name, shape)| (name, shape, weights.file_type())).collect();
        Self::create_typed(path, &typed, weights)
    }

    /// The same for tensors of several types, whose bytes follow by [`Self::push_bytes`].
    ///
    /// # Errors
    /// If the disk refuses.
    ///
    /// # Panics
    /// If a type is neither f32, bf16 nor U8.
    pub fn create_mixed(path: &Path, tensors: &[(&str, &[usize], DType)]) -> Result<Self> {
        let typed: Vec<_> = tensors.iter().map(|&(name, shape, dtype)| (name, shape, file_type(dtype))).collect();
        Self::create_typed(path, &typed, WeightType::F32)
    }

    fn create_typed(path: &Path, tensors: &[(&str, &[usize], FileType)], weights: WeightType) -> Result<Self> {
        let file = File::create(path).map_err(Error::io("create", path))?;
        let summed = Summed { file, bytes: 0, crc: crc32fast::Hasher::new() };
        let mut file = BufWriter::with_capacity(1 << 18, summed);
        file.write_all(&header::build(tensors)).map_err(Error::io("write", path))?;
        Ok(Self { path: path.to_owned(), file, weights, remaining: tensors.len() })
    }

    /// Tensors still to come.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Writes the next tensor.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push(&mut self, values: &[f32]) -> Result<()> {
        // Converted in pieces, so that no second copy of a large parameter exists.
        const PIECE: usize = 1 << 20;
        for piece in values.chunks(PIECE) {
            let written = match self.weights {
                WeightType::F32 => self.file.write_all(bytemuck::cast_slice(piece)),
                WeightType::Bf16 => {
                    let rounded: Vec<bf16> = piece.iter().map(|&value| bf16::from_f32(value)).collect();
                    self.file.write_all(bytemuck::cast_slice(&rounded))
                }
            };
            written.map_err(Error::io("write", &self.path))?;
        }
        self.remaining -= 1;
        Ok(())
    }

    /// Writes the next tensor, whose elements in memory these are.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io("write", &self.path))?;
        self.remaining -= 1;
        Ok(())
    }

    /// Brings everything to the disk.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn finish(self) -> Result<(PathBuf, Sum)> {
        let path = self.path;
        let summed = self.file.into_inner().map_err(|error| Error::io("write", &path)(error.into_error()))?;
        summed.file.sync_all().map_err(Error::io("sync", &path))?;
        Ok((path, Sum { bytes: summed.bytes, crc32: summed.crc.finalize() }))
    }
}

/// A file that remembers what went into it.
struct Summed {
    file: File,
    bytes: u64,
    crc: crc32fast::Hasher,
}

impl Write for Summed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A safetensors file being read.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a whole safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("read", path))?;
        let entries = header::read(path, &file)?;
        Ok(Self { path: path.to_owned(), file, entries })
    }

    /// Reads the elements of a tensor as they lie in memory.
    ///
    /// # Errors
    /// If there is no such tensor of that shape and type, or the file cannot be read.
    ///
    /// # Panics
    /// If the type is neither f32, bf16 nor U8.
    pub fn bytes(&self, name: &str, shape: &[usize], dtype: DType) -> Result<Vec<u8>> {
        let wanted = file_type(dtype);
        let found = self.entries.iter().find(|entry| entry.name == name);
        let entry = found.ok_or_else(|| Error::damaged(&self.path, format!("it has no tensor {name}")))?;
        if entry.shape != shape || entry.file_type != wanted {
            let got = format!("{} {:?}", entry.file_type.name(), entry.shape);
            return Err(Error::damaged(&self.path, format!("{name} is {got}, wanted {} {shape:?}", wanted.name())));
        }
        let mut bytes = vec![0; (entry.bytes.end - entry.bytes.start) as usize];
        self.file.read_exact_at(&mut bytes, entry.bytes.start).map_err(Error::io("read", &self.path))?;
        Ok(bytes)
    }
}

fn file_type(dtype: DType) -> FileType {
    match dtype {
        DType::F32 => FileType::F32,
        DType::Bf16 => FileType::Bf16,
        DType::U8 => FileType::U8,
        DType::F64 | DType::U32 => panic!("tensors of {dtype:?} are not written"),
    }
}
