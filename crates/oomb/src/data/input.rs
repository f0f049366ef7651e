//! Which files a list of paths means, what is in them, and their bytes, unpacked. It must not know documents or tokens.

use super::error::{Error, Result};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A file of text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Input {
    /// Where it is.
    pub(super) path: PathBuf,
    /// What is in it, as its name says.
    pub(super) content: Content,
    packing: Compression,
}

/// What is in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// One document in UTF-8.
    Text,
    /// A JSON object in each line.
    JsonLines,
    /// Rows of columns.
    Parquet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Bytes that were read of a file so far, packed as they lie there.
pub(super) type BytesRead = Rc<Cell<u64>>;

impl Input {
    /// What the name of a file says of it.
    pub(super) fn new(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let (stem, packing) = match name.rsplit_once('.') {
            Some((stem, "gz")) => (stem, Compression::Gzip),
            Some((stem, "zst" | "zstd")) => (stem, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        let content = match stem.rsplit_once('.') {
            Some((_, "jsonl" | "ndjson" | "json")) => Content::JsonLines,
            Some((_, "parquet")) => Content::Parquet,
            _ => Content::Text,
        };
        Self { path: path.to_path_buf(), content, packing }
    }

    /// Whether the file lies there as it is read.
    pub(super) fn is_plain(&self) -> bool {
        self.packing == Compression::None
    }

    /// Its bytes, unpacked.
    ///
    /// # Errors
    /// If it cannot be opened, or is not packed as its name says.
    pub(super) fn open(&self) -> Result<(Box<dyn Read>, BytesRead)> {
        let file = File::open(&self.path).map_err(Error::io("read", &self.path))?;
        let bytes_read = BytesRead::default();
        let counted = BufReader::with_capacity(1 << 18, Counted { file, bytes_read: bytes_read.clone() });
        let reader: Box<dyn Read> = match self.packing {
            Compression::None => Box::new(counted),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(counted)),
            Compression::Zstd => Box::new(ZstdFrames { source: counted, decoder: FrameDecoder::new(), in_frame: false }),
        };
        Ok((reader, bytes_read))
    }
}

/// The files of a list: a folder stands for the files in it that have text, by name; a pattern (`*`, `?`, `[…]`, `**` for
/// folders in folders) for the files it fits.
///
/// # Errors
/// If a path does not exist, or a folder or pattern has no file.
pub(super) fn list_inputs(paths: &[PathBuf]) -> Result<Vec<Input>> {
    let mut inputs = Vec::new();
    for path in paths {
        let before = inputs.len();
        let is_pattern = !path.exists() && path.to_string_lossy().contains(['*', '?', '[']);
        if is_pattern {
            inputs.extend(matching(path)?);
        } else if fs::metadata(path).map_err(Error::io("read", path))?.is_dir() {
            inputs.extend(inside(path)?);
        } else {
            inputs.push(Input::new(path));
        }
        if inputs.len() == before {
            let hint = if is_pattern {
                ": no file fits the pattern"
            } else {
                ": neither a prepared folder, nor one of .txt, .jsonl or .parquet files"
            };
            return Err(Error::Empty { what: path.display().to_string(), hint });
        }
    }
    for input in &inputs {
        if input.content == Content::Parquet && !input.is_plain() {
            return Err(Error::Packed { path: input.path.clone() });
        }
    }
    Ok(inputs)
}

fn matching(pattern: &Path) -> Result<Vec<Input>> {
    let text = pattern.to_string_lossy();
    let paths = glob::glob(&text).map_err(|e| Error::Pattern { pattern: text.clone().into_owned(), detail: e.to_string() })?;
    let mut inputs = Vec::new();
    for path in paths {
        let path = path.map_err(|e| Error::io("read", e.path().to_path_buf())(e.into()))?;
        if path.is_file() {
            inputs.push(Input::new(&path));
        }
    }
    Ok(inputs)
}

fn inside(folder: &Path) -> Result<Vec<Input>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let file = entry.map_err(Error::io("read", folder))?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let unpacked = [".gz", ".zst", ".zstd"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
        let is_text = [".txt", ".jsonl", ".ndjson", ".json", ".parquet"].iter().any(|end| unpacked.ends_with(end));
        if file.is_file() && is_text {
            files.push(file);
        }
    }
    files.sort();
    Ok(files.iter().map(|file| Input::new(file)).collect())
}

struct Counted {
    file: File,
    bytes_read: BytesRead,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes_read.set(self.bytes_read.get() + read as u64);
        Ok(read)
    }
}

/// All frames of a Zstandard file; the decoder knows one.
struct ZstdFrames<R: BufRead> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while !buffer.is_empty() {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder.decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1)).map_err(not_zstd)?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            self.in_frame = false;
        }
        Ok(0)
    }
}

impl<R: BufRead> ZstdFrames<R> {
    /// Reads the header of the next frame, past those that are to be skipped; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => {
                    self.in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    io::copy(&mut (&mut self.source).take(u64::from(length)), &mut io::sink())?;
                }
                Err(error) => return Err(not_zstd(error)),
            }
        }
        Ok(false)
    }
}

fn not_zstd(error: FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not Zstandard: {error}"))
}
