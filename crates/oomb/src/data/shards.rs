//! Token shards under way: files of tokens and masks, the list of documents, and the folder that appears complete or not at
//! all. It must not know what the tokens stand for.

use super::error::{Error, Result};
use super::index::{DOCUMENTS_FILE, Entry, INDEX_FILE, Index, Mask, Shard};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Tokens of a full shard: 64 MiB.
pub(super) const SHARD_TOKENS: u64 = 16 << 20;

/// Whether a mask is written beside the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Masks {
    /// Every token is trained.
    None,
    /// A flag per token.
    Written,
}

/// Writes shards one after the other.
pub(super) struct ShardWriter {
    folder: PathBuf,
    shard_tokens: u64,
    masks: Masks,
    open: Option<OpenShard>,
    documents: Checked,
    /// What was finished so far.
    pub(super) shards: Vec<Shard>,
    /// Tokens written so far.
    pub(super) num_tokens: u64,
    /// Tokens that are trained, so far.
    pub(super) num_trained: u64,
    /// The largest id so far.
    pub(super) largest_id: u32,
    /// Documents so far.
    pub(super) num_documents: u64,
}

struct OpenShard {
    tokens: Checked,
    mask: Option<Checked>,
    num_tokens: u64,
}

impl ShardWriter {
    /// Shards of `shard_tokens` in `folder`.
    ///
    /// # Errors
    /// If the folder cannot be written to.
    pub(super) fn new(folder: &Path, shard_tokens: u64, masks: Masks) -> Result<Self> {
        let documents = Checked::create(folder.join(DOCUMENTS_FILE))?;
        let folder = folder.to_path_buf();
        let (shards, open) = (Vec::new(), None);
        let counts = (0, 0, 0, 0);
        let (num_tokens, num_trained, largest_id, num_documents) = counts;
        Ok(Self { folder, shard_tokens, masks, open, documents, shards, num_tokens, num_trained, largest_id, num_documents })
    }

    /// Appends tokens; `trained` has a flag for each, and is not read where no masks are written.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(super) fn write(&mut self, ids: &[u32], trained: &[bool]) -> Result<()> {
        let (mut rest, mut flags) = (ids, trained);
        while !rest.is_empty() {
            let shard = match &mut self.open {
                Some(shard) => shard,
                None => self.open.insert(OpenShard::create(&self.folder, self.shards.len(), self.masks)?),
            };
            let now = rest.len().min((self.shard_tokens - shard.num_tokens) as usize);
            let bytes: Vec<u8> = rest[..now].iter().flat_map(|id| id.to_le_bytes()).collect();
            shard.tokens.write(&bytes)?;
            self.num_trained += now as u64;
            if let Some(mask) = &mut shard.mask {
                let bytes: Vec<u8> = flags[..now].iter().map(|&flag| u8::from(flag)).collect();
                mask.write(&bytes)?;
                self.num_trained -= flags[..now].iter().filter(|&&flag| !flag).count() as u64;
                flags = &flags[now..];
            }
            shard.num_tokens += now as u64;
            self.num_tokens += now as u64;
            self.largest_id = self.largest_id.max(rest[..now].iter().copied().max().unwrap_or(0));
            if shard.num_tokens == self.shard_tokens {
                self.finish_shard()?;
            }
            rest = &rest[now..];
        }
        Ok(())
    }

    /// Ends a document that was written.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(super) fn end_document(&mut self, entry: Entry) -> Result<()> {
        self.num_documents += 1;
        self.documents.write(&entry.to_bytes())
    }

    /// Finishes the last shard and the list of documents; returns the CRC-32 of the list.
    ///
    /// # Errors
    /// If the disk refuses.
    pub(super) fn finish(&mut self) -> Result<u32> {
        self.finish_shard()?;
        let (_, crc32) = self.documents.finish()?;
        Ok(crc32)
    }

    fn finish_shard(&mut self) -> Result<()> {
        let Some(mut shard) = self.open.take() else { return Ok(()) };
        let (file, crc32) = shard.tokens.finish()?;
        let mask = match &mut shard.mask {
            Some(mask) => {
                let (file, crc32) = mask.finish()?;
                Some(Mask { file, crc32 })
            }
            None => None,
        };
        self.shards.push(Shard { file, num_tokens: shard.num_tokens, crc32, mask });
        Ok(())
    }
}

impl OpenShard {
    fn create(folder: &Path, index: usize, masks: Masks) -> Result<Self> {
        let tokens = Checked::create(folder.join(format!("tokens-{index:05}.bin")))?;
        let mask = match masks {
            Masks::None => None,
            Masks::Written => Some(Checked::create(folder.join(format!("mask-{index:05}.bin")))?),
        };
        Ok(Self { tokens, mask, num_tokens: 0 })
    }
}

/// A file that is written once, with its checksum.
struct Checked {
    path: PathBuf,
    file: BufWriter<File>,
    crc: crc32fast::Hasher,
}

impl Checked {
    fn create(path: PathBuf) -> Result<Self> {
        let file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(Error::io("create", &path))?);
        Ok(Self { path, file, crc: crc32fast::Hasher::new() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.crc.update(bytes);
        self.file.write_all(bytes).map_err(Error::io("write", &self.path))
    }

    /// Name and checksum, once all is on the disk.
    fn finish(&mut self) -> Result<(String, u32)> {
        self.file.flush().and_then(|()| self.file.get_ref().sync_all()).map_err(Error::io("write", &self.path))?;
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, self.crc.clone().finalize()))
    }
}

/// Writes the index, last of all files.
///
/// # Errors
/// If the disk refuses.
pub(super) fn write_index(folder: &Path, index: &Index) -> Result<()> {
    let path = folder.join(INDEX_FILE);
    let text = serde_json::to_string_pretty(index).expect("an index has string keys only");
    let mut file = File::create(&path).map_err(Error::io("create", &path))?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))
}

/// A folder beside the output, removed unless it is published.
pub(super) struct Staging {
    /// Where to write.
    pub(super) path: PathBuf,
}

impl Staging {
    /// Creates it.
    pub(super) fn beside(out: &Path) -> Result<Self> {
        let path = neighbour(out, "partial");
        fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path })
    }

    /// Moves it into place; what was there before is removed last.
    pub(super) fn publish(&self, out: &Path) -> Result<()> {
        let old = neighbour(out, "replaced");
        let replaces = out.exists();
        if replaces {
            fs::rename(out, &old).map_err(Error::io("move", out))?;
        }
        fs::rename(&self.path, out).map_err(Error::io("create", out))?;
        if replaces {
            fs::remove_dir_all(&old).map_err(Error::io("remove", &old))?;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Gone when it was published. Otherwise an error is on its way already: a leftover folder is no second one.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// `out` with the process's number and `what` behind its name, so that two preparations do not meet.
fn neighbour(out: &Path, what: &str) -> PathBuf {
    let mut name = out.file_name().map_or_else(|| "prepared".into(), std::ffi::OsStr::to_os_string);
    name.push(format!(".{what}-{}", std::process::id()));
    out.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::super::dataset::Dataset;
    use super::super::index::{FORMAT, Recipe, SourceFile, VERSION};
    use super::super::tokenizer::TokenizerIdentity;
    use super::*;

    #[test]
    fn tokens_and_masks_cross_shards() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::new(folder.path(), 7, Masks::Written).unwrap();
        let ids: Vec<u32> = (0..30).map(|i| i * 1000).collect();
        let trained: Vec<bool> = (0..30).map(|i| i % 3 == 0).collect();
        for (ids, trained) in ids.chunks(4).zip(trained.chunks(4)) {
            writer.write(ids, trained).unwrap();
        }
        for num_tokens in [10, 20] {
            writer.end_document(Entry { num_tokens, file: 0, row: num_tokens as u32 }).unwrap();
        }
        let documents_crc32 = writer.finish().unwrap();
        assert_eq!(writer.shards.iter().map(|shard| shard.num_tokens).collect::<Vec<_>>(), [7, 7, 7, 7, 2]);
        assert_eq!(writer.num_trained, 10);
        let index = Index {
            format: FORMAT.to_owned(),
            version: VERSION,
            tokenizer: TokenizerIdentity::Bytes,
            recipe: Recipe::default(),
            vocab_size: 30_000,
            num_tokens: 30,
            num_trained: writer.num_trained,
            largest_id: writer.largest_id,
            num_documents: 2,
            documents_crc32,
            shards: writer.shards,
            files: vec![SourceFile { name: "talks.jsonl".to_owned(), ..SourceFile::default() }],
        };
        write_index(folder.path(), &index).unwrap();
        let dataset = Dataset::open(folder.path()).unwrap();
        for start in 0..=30 {
            for end in start..=30 {
                let inside = start as usize..end as usize;
                assert_eq!(dataset.tokens(start..end).unwrap(), ids[inside.clone()]);
                assert_eq!(dataset.trained(start..end).unwrap(), trained[inside]);
            }
        }
        assert_eq!((dataset.document(1), dataset.document_name(1)), (10..30, "talks.jsonl row 20".to_owned()));
    }
}
