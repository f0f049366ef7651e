//! A text file in pieces that are tokenised apart and give the same tokens as the whole. It must not know where tokens go.
//!
//! A piece ends where a line ends and the next begins with something visible, and only where tokenising the surroundings
//! in one and in two gives the same ids. Where no such place is found the piece grows, up to the whole file.

use super::error::{Error, Result};
use super::input::{BytesRead, Input};
use super::tokenizer::Tokenizer;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Text on either side of a cut that is tokenised to prove the cut, in bytes.
const CONTEXT_BYTES: usize = 1024;
/// Places tried before a piece grows instead.
const MAX_TRIES: usize = 32;

/// Reads a text file piece by piece.
pub(super) struct Pieces<'a> {
    path: PathBuf,
    file: Box<dyn Read>,
    bytes_read: BytesRead,
    tokenizer: &'a Tokenizer,
    piece_bytes: usize,
    /// Read, not yet handed out; the first `valid` bytes are UTF-8.
    buffer: Vec<u8>,
    valid: usize,
    /// Offset of the buffer in the file.
    offset: u64,
    at_end: bool,
}

impl<'a> Pieces<'a> {
    /// Opens a text file; pieces are about `piece_bytes` long.
    pub(super) fn open(input: &Input, tokenizer: &'a Tokenizer, piece_bytes: usize) -> Result<Self> {
        let (file, bytes_read) = input.open()?;
        Ok(Self {
            path: input.path.clone(),
            file,
            bytes_read,
            tokenizer,
            piece_bytes,
            buffer: Vec::new(),
            valid: 0,
            offset: 0,
            at_end: false,
        })
    }

    /// The next piece; `None` at the end of the file.
    pub(super) fn next_piece(&mut self) -> Result<Option<String>> {
        let mut wanted = self.piece_bytes;
        loop {
            self.fill(wanted)?;
            if self.at_end && self.valid <= self.piece_bytes {
                return Ok(self.take(self.valid));
            }
            if let Some(cut) = self.find_cut()? {
                return Ok(self.take(cut));
            }
            if self.at_end {
                return Ok(self.take(self.valid));
            }
            wanted *= 2;
        }
    }

    /// Bytes of the file that were read so far, as they lie there.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.get()
    }

    /// Reads until the buffer has `wanted` bytes or the file ends, and extends the valid part.
    fn fill(&mut self, wanted: usize) -> Result<()> {
        let missing = wanted.saturating_sub(self.buffer.len());
        if missing > 0 && !self.at_end {
            let mut limited = (&mut self.file).take(missing as u64);
            let read = limited.read_to_end(&mut self.buffer).map_err(Error::io("read", &self.path))?;
            self.at_end = read < missing;
        }
        match std::str::from_utf8(&self.buffer[self.valid..]) {
            Ok(text) => self.valid += text.len(),
            Err(e) => {
                self.valid += e.valid_up_to();
                if e.error_len().is_some() || self.at_end {
                    let (path, offset) = (self.path.clone(), self.offset + self.valid as u64);
                    return Err(Error::NotUtf8 { path, offset, byte: self.buffer[self.valid] });
                }
            }
        }
        Ok(())
    }

    fn find_cut(&self) -> Result<Option<usize>> {
        let text = std::str::from_utf8(&self.buffer[..self.valid]).expect("only the valid part");
        let mut places = text.rmatch_indices('\n').map(|(index, _)| index + 1).filter(|&cut| {
            let next = text[cut..].chars().next();
            next.is_some_and(|next| !next.is_whitespace())
        });
        for cut in places.by_ref().take(MAX_TRIES) {
            let mut start = cut.saturating_sub(CONTEXT_BYTES);
            let mut end = (cut + CONTEXT_BYTES).min(text.len());
            while !text.is_char_boundary(start) {
                start += 1;
            }
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            if self.tokenizer.splits_between(&text[start..cut], &text[cut..end])? {
                return Ok(Some(cut));
            }
        }
        Ok(None)
    }

    fn take(&mut self, cut: usize) -> Option<String> {
        if cut == 0 {
            return None;
        }
        let rest = self.buffer.split_off(cut);
        let piece = std::mem::replace(&mut self.buffer, rest);
        self.valid -= cut;
        self.offset += cut as u64;
        Some(String::from_utf8(piece).expect("only the valid part"))
    }
}

/// CRC-32 and length of a file, without keeping it in memory.
pub(super) fn fingerprint(path: &Path) -> Result<(u32, u64)> {
    let mut file = File::open(path).map_err(Error::io("read", path))?;
    let (mut crc, mut num_bytes, mut buffer) = (crc32fast::Hasher::new(), 0, vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if read == 0 {
            return Ok((crc.finalize(), num_bytes));
        }
        crc.update(&buffer[..read]);
        num_bytes += read as u64;
    }
}
