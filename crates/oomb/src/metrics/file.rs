//! `metrics.jsonl`: appended to step by step, and cut back where a run goes on from an earlier step. It must not know what
//! the numbers mean.

use super::{METRICS_FILE, Record};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

/// `metrics.jsonl` of a run, appended to step by step.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
}

impl MetricsFile {
    /// Opens or creates the file in `folder` with the lines of steps up to `step` alone, and returns how many those are.
    /// Lines of later steps, which will be done again, and a half-written one are dropped; the file changes at once or not
    /// at all.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn open(folder: &Path, step: usize) -> io::Result<(Self, usize)> {
        let path = folder.join(METRICS_FILE);
        let partial = folder.join(format!(".{METRICS_FILE}.partial"));
        let kept = keep_until(&path, &partial, step).map_err(named("cut", &path))?;
        std::fs::rename(&partial, &path).map_err(named("replace", &path))?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(named("sync", folder))?;
        let file = OpenOptions::new().append(true).open(&path).map_err(named("open", &path))?;
        Ok((Self { file }, kept))
    }

    /// Appends one line; it is with the system when this returns, so that a killed run keeps it.
    ///
    /// # Errors
    /// If the system refuses, most often because the disk is full.
    pub fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(named("write", Path::new(METRICS_FILE)))
    }

    /// Brings all lines to the disk, so that a machine that loses its power keeps them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all().map_err(named("sync", Path::new(METRICS_FILE)))
    }
}

fn named<'a>(action: &'a str, path: &'a Path) -> impl FnOnce(io::Error) -> io::Error + 'a {
    move |error| io::Error::new(error.kind(), format!("cannot {action} {}: {error}", path.display()))
}

/// Copies whole lines of steps up to `step`, the first of each.
fn keep_until(path: &Path, partial: &Path, step: usize) -> io::Result<usize> {
    let mut out = BufWriter::new(File::create(partial)?);
    let (mut kept, mut last) = (0, 0);
    if path.exists() {
        let mut lines = BufReader::new(File::open(path)?);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            let of: Option<usize> = line.ends_with(b"\n").then(|| step_of(&line)).flatten();
            if of.is_some_and(|of| of > last && of <= step) {
                out.write_all(&line)?;
                (kept, last) = (kept + 1, of.unwrap_or(last));
            }
            line.clear();
        }
    }
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok(kept)
}

fn step_of(line: &[u8]) -> Option<usize> {
    serde_json::from_slice::<serde_json::Value>(line).ok()?["step"].as_u64()?.try_into().ok()
}
