//! The rows of JSON lines and Parquet files, one after the other. It must not know what becomes of them.

use super::error::{Error, Result};
use super::input::{BytesRead, Content, Input};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One row.
pub(super) struct Row {
    /// Line of the file, or row of the table; from 1.
    pub(super) number: u64,
    /// Its fields, or what is wrong with it.
    pub(super) content: std::result::Result<Map<String, Value>, String>,
}

/// The rows of a file.
pub(super) struct Rows {
    path: PathBuf,
    number: u64,
    kind: Kind,
}

enum Kind {
    Lines { reader: BufReader<Box<dyn Read>>, bytes_read: BytesRead },
    Table { rows: RowIter<'static>, num_rows: u64, file_bytes: u64 },
}

impl Rows {
    /// Opens a file of rows. Of a table only the columns among `fields` are read.
    ///
    /// # Errors
    /// If the file cannot be read, is not what its name says, or is a table without the first of `fields`.
    ///
    /// # Panics
    /// If the file is one of plain text.
    pub(super) fn open(input: &Input, fields: &[&str]) -> Result<Self> {
        let kind = match input.content {
            Content::Text => unreachable!("text has no rows"),
            Content::JsonLines => {
                let (reader, bytes_read) = input.open()?;
                Kind::Lines { reader: BufReader::with_capacity(1 << 18, reader), bytes_read }
            }
            Content::Parquet => open_table(&input.path, fields)?,
        };
        Ok(Self { path: input.path.clone(), number: 0, kind })
    }

    /// The next row; `None` at the end. Empty lines are no rows.
    ///
    /// # Errors
    /// If the file cannot be read on. A row that is wrong in itself is no error here.
    pub(super) fn next_row(&mut self) -> Result<Option<Row>> {
        match &mut self.kind {
            Kind::Lines { reader, .. } => loop {
                let mut line = Vec::new();
                reader.read_until(b'\n', &mut line).map_err(Error::io("read", &self.path))?;
                if line.is_empty() {
                    return Ok(None);
                }
                self.number += 1;
                if !line.iter().all(u8::is_ascii_whitespace) {
                    return Ok(Some(Row { number: self.number, content: parse_line(&line) }));
                }
            },
            Kind::Table { rows, .. } => {
                let next = guarded(|| rows.next().transpose());
                self.number += 1;
                let row = match next {
                    Ok(Some(row)) => row,
                    Ok(None) => return Ok(None),
                    Err(detail) => return Err(table_error(&self.path, format!("cannot read row {}: {detail}", self.number))),
                };
                let Value::Object(fields) = without_nulls(row.to_json_value()) else { unreachable!("rows have named columns") };
                Ok(Some(Row { number: self.number, content: Ok(fields) }))
            }
        }
    }

    /// Bytes of the file that were read so far; for a table its share of the rows.
    pub(super) fn bytes_read(&self) -> u64 {
        match &self.kind {
            Kind::Lines { bytes_read, .. } => bytes_read.get(),
            Kind::Table { num_rows, file_bytes, .. } => {
                (u128::from(*file_bytes) * u128::from(self.number) / u128::from((*num_rows).max(1))) as u64
            }
        }
    }
}

fn parse_line(line: &[u8]) -> std::result::Result<Map<String, Value>, String> {
    // Some editors begin a file with a mark that it is UTF-8.
    match serde_json::from_slice(line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line)) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err("not a JSON object".to_owned()),
        // The parser counts lines from here; the row is named by who reports this.
        Err(e) => Err(format!("not JSON: {}", e.to_string().replace(" at line 1 column", " at column"))),
    }
}

fn open_table(path: &Path, fields: &[&str]) -> Result<Kind> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let file_bytes = file.metadata().map_err(Error::io("read", path))?.len();
    let wrong = |detail| table_error(path, detail);
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(wrong)?;
    let metadata = reader.metadata().file_metadata();
    let num_rows = u64::try_from(metadata.num_rows()).unwrap_or(0);
    let root = metadata.schema();
    let columns = root.get_fields();
    if !columns.iter().any(|column| Some(&column.name()) == fields.first()) {
        let names: Vec<&str> = columns.iter().map(|column| column.name()).collect();
        let (wanted, names) = (fields.first().copied().unwrap_or_default(), names.join(", "));
        return Err(wrong(format!("there is no column `{wanted}`: it has {names}; name one with data.field (--field)")));
    }
    let wanted: Vec<Arc<Type>> = columns.iter().filter(|column| fields.contains(&column.name())).cloned().collect();
    let projection = guarded(|| Type::group_type_builder(root.name()).with_fields(wanted).build()).map_err(wrong)?;
    let rows = guarded(|| RowIter::from_file_into(Box::new(reader)).project(Some(projection))).map_err(wrong)?;
    Ok(Kind::Table { rows, num_rows, file_bytes })
}

/// Runs a step of the reader, which panics on some damaged files: what is wrong, in either way.
fn guarded<T>(step: impl FnOnce() -> parquet::errors::Result<T>) -> std::result::Result<T, String> {
    // After a panic the reader is dropped, not used again: nothing half-changed is seen.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().map(|&said| said.to_owned()).or_else(|| panic.downcast_ref().cloned());
            Err(format!("damaged: {}", said.unwrap_or_else(|| "its reader gave up".to_owned())))
        }
    }
}

/// A table has all fields in every row, null where a row has none; a JSON line leaves them out.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(fields.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        other => other,
    }
}

fn table_error(path: &Path, detail: String) -> Error {
    Error::Table { path: path.to_path_buf(), detail }
}
