//! `checksums.txt` of a checkpoint: length and CRC-32 of every other file, and of its own lines. It must not know what the
//! files hold.

use super::{Error, Result};
use crate::checkpoint::Sum;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

const SUMS_FILE: &str = "checksums.txt";

/// Writes the file: sums that are `known` (by path within `folder`), the others by reading.
pub(super) fn write(folder: &Path, known: &[(PathBuf, Sum)]) -> Result<()> {
    let mut text = String::new();
    for file in files(folder)? {
        let sum = match known.iter().find(|(path, _)| *path == file) {
            Some((_, sum)) => *sum,
            None => sum_of(&folder.join(&file))?,
        };
        text += &format!("{:08x} {} {}\n", sum.crc32, sum.bytes, file.display());
    }
    text += &format!("{:08x}\n", crc32fast::hash(text.as_bytes()));
    write_synced(&folder.join(SUMS_FILE), text.as_bytes())
}

/// Reads every file of the checkpoint and compares.
pub(super) fn verify(folder: &Path) -> Result<()> {
    let path = folder.join(SUMS_FILE);
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let (lines, own) = text.trim_end_matches('\n').rsplit_once('\n').unwrap_or_default();
    let lines = format!("{lines}\n");
    if own != format!("{:08x}", crc32fast::hash(lines.as_bytes())) {
        return Err(Error::damaged(&path, "its last line is not the checksum of the others"));
    }
    let mut missing: BTreeSet<PathBuf> = files(folder)?;
    missing.remove(Path::new(SUMS_FILE));
    for line in lines.lines() {
        let mut parts = line.splitn(3, ' ');
        let crc32 = parts.next().and_then(|crc| u32::from_str_radix(crc, 16).ok());
        let bytes = parts.next().and_then(|bytes| bytes.parse::<u64>().ok());
        let (Some(crc32), Some(bytes), Some(name)) = (crc32, bytes, parts.next()) else {
            return Err(Error::damaged(&path, format!("it has the line {line:?}")));
        };
        let file = folder.join(name);
        let length = file.metadata().map_err(Error::io("read", &file))?.len();
        if length != bytes {
            return Err(Error::damaged(&file, format!("it has {length} bytes, wanted {bytes}")));
        }
        let got = sum_of(&file)?.crc32;
        if got != crc32 {
            return Err(Error::damaged(&file, format!("its CRC is {got:08x}, wanted {crc32:08x}")));
        }
        missing.remove(Path::new(name));
    }
    match missing.pop_first() {
        Some(extra) => Err(Error::damaged(&folder.join(extra), "it is not in checksums.txt")),
        None => Ok(()),
    }
}

/// Writes a small file and brings it to the disk.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(Error::io("write", path))
}

/// Brings a folder's entries to the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(Error::io("sync", path))
}

fn sum_of(path: &Path) -> Result<Sum> {
    let mut file = File::open(path).map_err(Error::io("read", path))?;
    let (mut crc, mut bytes, mut buffer) = (crc32fast::Hasher::new(), 0, vec![0; 1 << 20]);
    loop {
        let read = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if read == 0 {
            return Ok(Sum { bytes, crc32: crc.finalize() });
        }
        crc.update(&buffer[..read]);
        bytes += read as u64;
    }
}

/// Files of a checkpoint, by path within it, those of its folders included.
fn files(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let (mut found, mut open) = (BTreeSet::new(), vec![PathBuf::new()]);
    while let Some(inner) = open.pop() {
        let path = folder.join(&inner);
        for entry in std::fs::read_dir(&path).map_err(Error::io("read", &path))? {
            let entry = entry.map_err(Error::io("read", &path))?;
            let name = inner.join(entry.file_name());
            if entry.path().is_dir() {
                open.push(name);
            } else {
                found.insert(name);
            }
        }
    }
    Ok(found)
}
