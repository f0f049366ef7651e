//! Files of text to a folder of token shards, written beside its place and moved there when it is complete. It must not know
//! configurations or terminals.

use super::chat::Encoded;
use super::dataset::Dataset;
use super::error::{Error, Result};
use super::index::{Entry, FORMAT, Index, LEFT_OUT_FILE, SourceFile, VERSION, is_prepared, read_index};
use super::input::{Content, Input, list_inputs};
use super::pieces::{Pieces, fingerprint};
use super::reading::Reading;
use super::rows::{Row, Rows};
use super::shards::{Masks, SHARD_TOKENS, ShardWriter, Staging, write_index};
use super::tokenizer::Tokenizer;
use crate::config::{DataFormat, Malformed};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Text tokenised as one, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// Pieces tokenised at once.
const BATCH_PIECES: usize = 16;
/// Rows tokenised at once.
const BATCH_ROWS: usize = 1024;
/// Bytes of a file after which a batch of rows ends early.
const BATCH_BYTES: u64 = 4 << 20;
/// Rows left out that are named in the result; all are in the folder.
const NAMED: usize = 10;

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
    /// Files, folders of files, or patterns of files, in this order. A text file is a document, and so is each row of another.
    pub inputs: &'a [PathBuf],
    /// Where to.
    pub out: &'a Path,
    /// How to make tokens of text.
    pub tokenizer: &'a Tokenizer,
    /// How to make documents of rows.
    pub reading: &'a Reading,
    /// If `out` exists.
    pub existing: Existing,
}

/// How far a preparation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advance {
    /// Bytes of files read so far.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Tokens written so far.
    pub num_tokens: u64,
}

/// A file or row that was left out.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LeftOut {
    /// As it was named.
    pub file: String,
    /// From 1; 0 for a whole file.
    pub row: u64,
    /// "empty", or what is wrong with it.
    pub why: String,
}

/// What came of it.
#[derive(Debug)]
pub enum Prepared {
    /// The folder was written.
    Written {
        /// It. Its index counts what was left out, by file.
        dataset: Dataset,
        /// The first of what was left out; all of it is in the folder's `left_out.jsonl`.
        left_out: Vec<LeftOut>,
    },
    /// The folder had been prepared from the same inputs in the same way.
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
/// Memory is bounded by a batch of pieces or rows, unless the tokenizer lets a text file be cut nowhere. The folder appears
/// complete or not at all.
///
/// # Errors
/// If an input is missing or not UTF-8, if a row cannot be used, if there is no text, or if the output folder exists and is
/// something else.
pub fn prepare(request: &PrepareRequest<'_>, report: &mut dyn FnMut(Advance)) -> Result<Prepared> {
    let inputs = list_inputs(request.inputs)?;
    for input in &inputs {
        request.reading.check(input)?;
    }
    if let Some(dataset) = existing_output(request, &inputs)? {
        return Ok(Prepared::AlreadyThere(dataset));
    }
    let staging = Staging::beside(request.out)?;
    let mut work = Work::new(request, &staging.path, &inputs)?;
    let mut files = Vec::with_capacity(inputs.len());
    for input in &inputs {
        files.push(work.file(input, report)?);
    }
    if work.writer.num_tokens == 0 {
        if let Some(error) = work.first_malformed {
            return Err(error);
        }
        let what = request.inputs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(Error::Empty { what, hint: ": the text is empty" });
    }
    let documents_crc32 = work.writer.finish()?;
    let left_out = work.left_out.finish()?;
    let index = Index {
        format: FORMAT.to_owned(),
        version: VERSION,
        tokenizer: request.tokenizer.identity().clone(),
        recipe: request.reading.recipe().clone(),
        vocab_size: request.tokenizer.vocab_size(),
        num_tokens: work.writer.num_tokens,
        num_trained: work.writer.num_trained,
        largest_id: work.writer.largest_id,
        num_documents: work.writer.num_documents,
        documents_crc32,
        shards: work.writer.shards,
        files,
    };
    request.tokenizer.write(&staging.path.join("tokenizer.json"))?;
    write_index(&staging.path, &index)?;
    staging.publish(request.out)?;
    Ok(Prepared::Written { dataset: Dataset::open(request.out)?, left_out })
}

/// Opens the output if it was made of the same inputs; refuses it if it must not be touched.
fn existing_output(request: &PrepareRequest<'_>, inputs: &[Input]) -> Result<Option<Dataset>> {
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
    let (index, _) = read_index(out)?;
    let mut made_of = Vec::new();
    for input in inputs {
        let (crc, num_bytes) = fingerprint(&input.path)?;
        if num_bytes > 0 {
            made_of.push((crc, num_bytes));
        }
    }
    let was_made_of = index.files.iter().map(|file| (file.source_crc32, file.source_bytes)).filter(|&(_, bytes)| bytes > 0);
    let same = index.tokenizer == *request.tokenizer.identity() && index.recipe == *request.reading.recipe();
    if !same || !was_made_of.eq(made_of) {
        return refuse(
            "was prepared from other text, in another way or with another tokenizer: name another folder, or give --overwrite",
        );
    }
    Dataset::open(out).map(Some)
}

/// A preparation under way.
struct Work<'a> {
    request: &'a PrepareRequest<'a>,
    writer: ShardWriter,
    left_out: LeftOutWriter,
    first_malformed: Option<Error>,
    /// Files that are done, and their bytes.
    num_files: u32,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Work<'a> {
    fn new(request: &'a PrepareRequest<'a>, folder: &Path, inputs: &[Input]) -> Result<Self> {
        let mut total_bytes = 0;
        for input in inputs {
            total_bytes += fs::metadata(&input.path).map_err(Error::io("read", &input.path))?.len();
        }
        let masks = match request.reading.recipe().format {
            DataFormat::Text => Masks::None,
            DataFormat::Chat => Masks::Written,
        };
        let writer = ShardWriter::new(folder, SHARD_TOKENS, masks)?;
        let left_out = LeftOutWriter { path: folder.join(LEFT_OUT_FILE), file: None, first: Vec::new() };
        Ok(Self { request, writer, left_out, first_malformed: None, num_files: 0, done_bytes: 0, total_bytes })
    }

    /// Tokenises a file and counts what became of it.
    fn file(&mut self, input: &Input, report: &mut dyn FnMut(Advance)) -> Result<SourceFile> {
        let (source_crc32, source_bytes) = fingerprint(&input.path)?;
        let name = input.path.display().to_string();
        let mut file = SourceFile { name, source_bytes, source_crc32, ..SourceFile::default() };
        match input.content {
            Content::Text => self.text(input, &mut file, report)?,
            Content::JsonLines | Content::Parquet => self.rows(input, &mut file, report)?,
        }
        self.num_files += 1;
        self.done_bytes += source_bytes;
        Ok(file)
    }

    fn text(&mut self, input: &Input, file: &mut SourceFile, report: &mut dyn FnMut(Advance)) -> Result<()> {
        let first_token = self.writer.num_tokens;
        let mut pieces = Pieces::open(input, self.request.tokenizer, PIECE_BYTES)?;
        while encode_batch(&mut pieces, self.request.tokenizer, &mut self.writer)? {
            report(self.advance(pieces.bytes_read()));
        }
        let num_tokens = self.writer.num_tokens - first_token;
        if num_tokens == 0 {
            file.num_empty = 1;
            return self.left_out.add(LeftOut { file: file.name.clone(), row: 0, why: "empty".to_owned() });
        }
        file.num_documents = 1;
        self.writer.end_document(Entry { num_tokens, file: self.num_files, row: 0 })
    }

    fn rows(&mut self, input: &Input, file: &mut SourceFile, report: &mut dyn FnMut(Advance)) -> Result<()> {
        let mut rows = Rows::open(input, &self.request.reading.fields())?;
        loop {
            let (before, mut batch) = (rows.bytes_read(), Vec::new());
            while batch.len() < BATCH_ROWS
                && rows.bytes_read() < before + BATCH_BYTES
                && let Some(row) = rows.next_row()?
            {
                batch.push(row);
            }
            if batch.is_empty() {
                return Ok(());
            }
            let (reading, tokenizer) = (self.request.reading, self.request.tokenizer);
            let document =
                |row: &Row| row.content.as_ref().map_err(String::clone).and_then(|row| reading.document(tokenizer, row));
            let documents: Vec<_> = batch.par_iter().map(document).collect();
            for (row, document) in batch.iter().zip(documents) {
                self.row(&input.path, row.number, document, file)?;
            }
            report(self.advance(rows.bytes_read()));
        }
    }

    fn row(
        &mut self,
        path: &Path,
        row: u64,
        document: std::result::Result<Option<Encoded>, String>,
        file: &mut SourceFile,
    ) -> Result<()> {
        let why = match document {
            Ok(Some(encoded)) => {
                self.writer.write(&encoded.ids, &encoded.trained)?;
                file.num_documents += 1;
                let num_tokens = encoded.ids.len() as u64;
                let row = u32::try_from(row).unwrap_or(u32::MAX);
                return self.writer.end_document(Entry { num_tokens, file: self.num_files, row });
            }
            Ok(None) => {
                file.num_empty += 1;
                "nothing in it is trained".to_owned()
            }
            Err(problem) => {
                let error = Error::Row { path: path.to_path_buf(), row, problem: problem.clone() };
                if self.request.reading.recipe().malformed == Malformed::Error {
                    return Err(error);
                }
                file.num_malformed += 1;
                self.first_malformed.get_or_insert(error);
                problem
            }
        };
        self.left_out.add(LeftOut { file: file.name.clone(), row, why })
    }

    /// `bytes_read` of the file in work.
    fn advance(&self, bytes_read: u64) -> Advance {
        let (done_bytes, total_bytes) = (self.done_bytes + bytes_read, self.total_bytes);
        Advance { done_bytes: done_bytes.min(total_bytes), total_bytes, num_tokens: self.writer.num_tokens }
    }
}

/// Tokenises the next pieces and writes them; false at the end of the file.
fn encode_batch(pieces: &mut Pieces<'_>, tokenizer: &Tokenizer, writer: &mut ShardWriter) -> Result<bool> {
    let mut batch = Vec::with_capacity(BATCH_PIECES);
    while batch.len() < BATCH_PIECES
        && let Some(piece) = pieces.next_piece()?
    {
        batch.push(piece);
    }
    let texts: Vec<&str> = batch.iter().map(String::as_str).collect();
    for ids in tokenizer.encode_all(&texts)? {
        writer.write(&ids, &[])?;
    }
    Ok(!batch.is_empty())
}

/// Writes down what was left out, in a file that is there only if something was.
struct LeftOutWriter {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    first: Vec<LeftOut>,
}

impl LeftOutWriter {
    fn add(&mut self, left_out: LeftOut) -> Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(BufWriter::new(File::create(&self.path).map_err(Error::io("create", &self.path))?)),
        };
        let line = serde_json::to_string(&left_out).expect("text and a number");
        writeln!(file, "{line}").map_err(Error::io("write", &self.path))?;
        if self.first.len() < NAMED {
            self.first.push(left_out);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Vec<LeftOut>> {
        if let Some(file) = &mut self.file {
            file.flush().map_err(Error::io("write", &self.path))?;
        }
        Ok(self.first)
    }
}
