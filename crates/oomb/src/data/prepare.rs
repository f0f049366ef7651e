//! Text files to a folder of token shards, written beside its place and moved there when it is complete. It must not know
//! configurations or terminals.

use super::dataset::{Dataset, Document, FORMAT, INDEX_FILE, Index, Shard, VERSION, is_prepared, read_index};
use super::error::{Error, Result};
use super::pieces::{Pieces, fingerprint};
use super::tokenizer::Tokenizer;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Tokens of a full shard: 64 MiB.
const SHARD_TOKENS: u64 = 16 << 20;
/// Text tokenised as one, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces tokenised at once.
const BATCH_PIECES: usize = 16;

/// What to do with an output folder that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Leave it; an error unless it was prepared from the same inputs.
    Keep,
    /// Replace it, if it was prepared before.
    Overwrite,
}

/// What to prepare.
pub struct PrepareRequest<'a> {
    /// Text files, or folders of `.txt` files; one document per file, in this order.
    pub inputs: &'a [PathBuf],
    /// Where to.
    pub out: &'a Path,
    /// How to.
    pub tokenizer: &'a Tokenizer,
    /// If `out` exists.
    pub existing: Existing,
}

/// How far a preparation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advance {
    /// Text read so far.
    pub done_bytes: u64,
    /// All text.
    pub total_bytes: u64,
    /// Tokens written so far.
    pub num_tokens: u64,
}

/// What came of it.
#[derive(Debug)]
pub enum Prepared {
    /// The folder was written; inputs without text were left out.
    Written {
        /// It.
        dataset: Dataset,
        /// Empty inputs.
        skipped: Vec<PathBuf>,
    },
    /// The folder had been prepared from the same inputs by the same tokenizer.
    AlreadyThere(Dataset),
}

impl Prepared {
    /// The folder, opened.
    pub fn into_dataset(self) -> Dataset {
        match self {
            Self::Written { dataset, .. } | Self::AlreadyThere(dataset) => dataset,
        }
    }
}

/// Tokenises files into a folder, reporting after every batch.
///
/// Memory is bounded by a batch of pieces, unless the tokenizer lets a file be cut nowhere. The folder appears complete or
/// not at all.
///
/// # Errors
/// If an input is missing or not UTF-8, if there is no text, or if the output folder exists and is something else.
pub fn prepare(request: &PrepareRequest<'_>, report: &mut dyn FnMut(Advance)) -> Result<Prepared> {
    let inputs = list_inputs(request.inputs)?;
    if let Some(dataset) = existing_output(request, &inputs)? {
        return Ok(Prepared::AlreadyThere(dataset));
    }
    let staging = Staging::beside(request.out)?;
    let mut total_bytes = 0;
    for input in &inputs {
        total_bytes += fs::metadata(input).map_err(Error::io("read", input))?.len();
    }
    let mut writer = ShardWriter::new(&staging.path, SHARD_TOKENS);
    let (mut documents, mut skipped, mut done_bytes) = (Vec::new(), Vec::new(), 0);
    for input in &inputs {
        let first_token = writer.num_tokens;
        let mut pieces = Pieces::open(input, request.tokenizer, PIECE_BYTES)?;
        while let Some(read) = encode_batch(&mut pieces, request.tokenizer, &mut writer)? {
            done_bytes += read;
            report(Advance { done_bytes, total_bytes, num_tokens: writer.num_tokens });
        }
        let (source_crc32, source_bytes) = pieces.fingerprint();
        let num_tokens = writer.num_tokens - first_token;
        if num_tokens == 0 {
            skipped.push(input.clone());
            continue;
        }
        let name = input.display().to_string();
        documents.push(Document { name, first_token, num_tokens, source_bytes, source_crc32 });
    }
    if writer.num_tokens == 0 {
        let what = request.inputs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(Error::Empty { what, hint: ": the text is empty" });
    }
    writer.finish_shard()?;
    let index = Index {
        format: FORMAT.to_owned(),
        version: VERSION,
        tokenizer: request.tokenizer.identity().clone(),
        vocab_size: request.tokenizer.vocab_size(),
        num_tokens: writer.num_tokens,
        largest_id: writer.largest_id,
        shards: writer.shards,
        documents,
    };
    if let Some(file) = request.tokenizer.file() {
        fs::copy(file, staging.path.join("tokenizer.json")).map_err(Error::io("copy", file))?;
    }
    write_index(&staging.path, &index)?;
    staging.publish(request.out)?;
    Ok(Prepared::Written { dataset: Dataset::open(request.out)?, skipped })
}

/// The text files of a list: folders stand for their `.txt` files, by name.
///
/// # Errors
/// If a path does not exist, or a folder has no `.txt` file.
pub(super) fn list_inputs(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !fs::metadata(path).map_err(Error::io("read", path))?.is_dir() {
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        for entry in fs::read_dir(path).map_err(Error::io("read", path))? {
            let file = entry.map_err(Error::io("read", path))?.path();
            if file.is_file() && file.extension().is_some_and(|extension| extension == "txt") {
                files.push(file);
            }
        }
        files[before..].sort();
        if files.len() == before {
            return Err(Error::Empty {
                what: path.display().to_string(),
                hint: ": neither a prepared folder, nor one of .txt files",
            });
        }
    }
    Ok(files)
}

/// Opens the output if it was made of the same inputs; refuses it if it must not be touched.
fn existing_output(request: &PrepareRequest<'_>, inputs: &[PathBuf]) -> Result<Option<Dataset>> {
    let out = request.out;
    let refuse = |problem| Err(Error::OutputExists { path: out.to_path_buf(), problem });
    if !out.exists() {
        return Ok(None);
    }
    if !out.is_dir() {
        return refuse("is a file: name a folder");
    }
    if fs::read_dir(out).map_err(Error::io("read", out))?.next().is_none() {
        return Ok(None);
    }
    if !is_prepared(out) {
        return refuse("is not empty, and was not made by `oomb prepare`: name another folder");
    }
    if request.existing == Existing::Overwrite {
        return Ok(None);
    }
    let index = read_index(out)?;
    let mut made_of = Vec::new();
    for input in inputs {
        let (crc, num_bytes) = fingerprint(input)?;
        if num_bytes > 0 {
            made_of.push((crc, num_bytes));
        }
    }
    let was_made_of = index.documents.iter().map(|document| (document.source_crc32, document.source_bytes));
    if index.tokenizer != *request.tokenizer.identity() || !was_made_of.eq(made_of) {
        return refuse("was prepared from other text or with another tokenizer: name another folder, or give --overwrite");
    }
    Dataset::open(out).map(Some)
}

/// Tokenises the next pieces and writes them; returns the bytes of text, `None` at the end of the file.
fn encode_batch(pieces: &mut Pieces<'_>, tokenizer: &Tokenizer, writer: &mut ShardWriter) -> Result<Option<u64>> {
    let mut batch = Vec::with_capacity(BATCH_PIECES);
    while batch.len() < BATCH_PIECES
        && let Some(piece) = pieces.next_piece()?
    {
        batch.push(piece);
    }
    if batch.is_empty() {
        return Ok(None);
    }
    let texts: Vec<&str> = batch.iter().map(String::as_str).collect();
    for ids in tokenizer.encode_all(&texts)? {
        writer.write(&ids)?;
    }
    Ok(Some(batch.iter().map(|piece| piece.len() as u64).sum()))
}

struct ShardWriter {
    folder: PathBuf,
    shard_tokens: u64,
    open: Option<OpenShard>,
    shards: Vec<Shard>,
    num_tokens: u64,
    largest_id: u32,
}

struct OpenShard {
    path: PathBuf,
    file: BufWriter<File>,
    crc: crc32fast::Hasher,
    num_tokens: u64,
}

impl ShardWriter {
    fn new(folder: &Path, shard_tokens: u64) -> Self {
        Self { folder: folder.to_path_buf(), shard_tokens, open: None, shards: Vec::new(), num_tokens: 0, largest_id: 0 }
    }

    fn write(&mut self, ids: &[u32]) -> Result<()> {
        let mut rest = ids;
        while !rest.is_empty() {
            let shard = match &mut self.open {
                Some(shard) => shard,
                None => self.open.insert(OpenShard::create(&self.folder, self.shards.len())?),
            };
            let (now, later) = rest.split_at(rest.len().min((self.shard_tokens - shard.num_tokens) as usize));
            let bytes: Vec<u8> = now.iter().flat_map(|id| id.to_le_bytes()).collect();
            shard.crc.update(&bytes);
            shard.file.write_all(&bytes).map_err(Error::io("write", &shard.path))?;
            shard.num_tokens += now.len() as u64;
            self.num_tokens += now.len() as u64;
            self.largest_id = self.largest_id.max(now.iter().copied().max().unwrap_or(0));
            if shard.num_tokens == self.shard_tokens {
                self.finish_shard()?;
            }
            rest = later;
        }
        Ok(())
    }

    fn finish_shard(&mut self) -> Result<()> {
        let Some(shard) = self.open.take() else { return Ok(()) };
        let file = shard.file.into_inner().map_err(|e| Error::io("write", &shard.path)(e.into_error()))?;
        file.sync_all().map_err(Error::io("write", &shard.path))?;
        let file = shard_name(self.shards.len());
        self.shards.push(Shard { file, num_tokens: shard.num_tokens, crc32: shard.crc.finalize() });
        Ok(())
    }
}

impl OpenShard {
    fn create(folder: &Path, index: usize) -> Result<Self> {
        let path = folder.join(shard_name(index));
        let file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(Error::io("create", &path))?);
        Ok(Self { path, file, crc: crc32fast::Hasher::new(), num_tokens: 0 })
    }
}

fn shard_name(index: usize) -> String {
    format!("tokens-{index:05}.bin")
}

fn write_index(folder: &Path, index: &Index) -> Result<()> {
    let path = folder.join(INDEX_FILE);
    let text = serde_json::to_string_pretty(index).expect("an index has string keys only");
    let mut file = File::create(&path).map_err(Error::io("create", &path))?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(Error::io("write", &path))
}

/// A folder beside the output, removed unless it is published.
struct Staging {
    path: PathBuf,
}

impl Staging {
    fn beside(out: &Path) -> Result<Self> {
        let path = neighbour(out, "partial");
        fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path })
    }

    /// Moves it into place; what was there before is removed last.
    fn publish(&self, out: &Path) -> Result<()> {
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
    use super::*;
    use crate::data::TokenizerIdentity;

    #[test]
    fn tokens_cross_shards() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::new(folder.path(), 7);
        let ids: Vec<u32> = (0..30).map(|i| i * 1000).collect();
        for part in ids.chunks(4) {
            writer.write(part).unwrap();
        }
        writer.finish_shard().unwrap();
        assert_eq!(writer.shards.iter().map(|shard| shard.num_tokens).collect::<Vec<_>>(), [7, 7, 7, 7, 2]);
        let document = |first_token, num_tokens| Document {
            name: String::new(),
            first_token,
            num_tokens,
            source_bytes: num_tokens,
            source_crc32: 0,
        };
        let index = Index {
            format: FORMAT.to_owned(),
            version: VERSION,
            tokenizer: TokenizerIdentity::Bytes,
            vocab_size: 30_000,
            num_tokens: 30,
            largest_id: writer.largest_id,
            shards: writer.shards,
            documents: vec![document(0, 10), document(10, 20)],
        };
        write_index(folder.path(), &index).unwrap();
        let dataset = Dataset::open(folder.path()).unwrap();
        for start in 0..=30 {
            for end in start..=30 {
                assert_eq!(dataset.tokens(start..end).unwrap(), ids[start as usize..end as usize]);
            }
        }
    }
}
