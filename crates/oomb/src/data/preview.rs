//! One document as it will be trained, to be looked at. It must not know terminals.

use super::chat::{Rendered, encode};
use super::error::{Error, Result};
use super::input::{Content, Input, list_inputs};
use super::pieces::Pieces;
use super::reading::Reading;
use super::rows::Rows;
use super::tokenizer::Tokenizer;
use std::ops::Range;
use std::path::PathBuf;

/// Bytes of a text file that are shown.
const TEXT_BYTES: usize = 1000;

/// A document, with what is trained of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preview {
    /// "talks.jsonl row 1", or the file and that only its start is shown.
    pub name: String,
    /// As the tokenizer gets it.
    pub text: String,
    /// Bytes whose tokens are trained to be predicted; ascending, in runs.
    pub trained: Vec<Range<usize>>,
    /// Its tokens.
    pub num_tokens: usize,
    /// Those that are trained.
    pub num_trained: usize,
}

/// The first document of a list of inputs, as [`super::prepare`] would make it. Nothing is written.
///
/// # Errors
/// As [`super::prepare`]; the first row is never left out.
pub fn preview(inputs: &[PathBuf], tokenizer: &Tokenizer, reading: &Reading) -> Result<Preview> {
    let inputs = list_inputs(inputs)?;
    for input in &inputs {
        reading.check(input)?;
        let found = match input.content {
            Content::Text => first_text(input, tokenizer)?,
            Content::JsonLines | Content::Parquet => first_row(input, tokenizer, reading)?,
        };
        if let Some((name, rendered)) = found {
            return of(name, rendered, tokenizer);
        }
    }
    let what = inputs.iter().map(|input| input.path.display().to_string()).collect::<Vec<_>>().join(", ");
    Err(Error::Empty { what, hint: ": there is nothing to show" })
}

fn first_text(input: &Input, tokenizer: &Tokenizer) -> Result<Option<(String, Rendered)>> {
    let Some(mut text) = Pieces::open(input, tokenizer, TEXT_BYTES)?.next_piece()? else { return Ok(None) };
    text.truncate(text.floor_char_boundary(TEXT_BYTES));
    let name = format!("{}, its start", input.path.display());
    Ok(Some((name, Rendered { trained: std::iter::once(0..text.len()).collect(), text })))
}

fn first_row(input: &Input, tokenizer: &Tokenizer, reading: &Reading) -> Result<Option<(String, Rendered)>> {
    let Some(row) = Rows::open(input, &reading.fields())?.next_row()? else { return Ok(None) };
    let number = row.number;
    let rendered = row.content.and_then(|row| reading.render(tokenizer, &row));
    let rendered = rendered.map_err(|problem| Error::Row { path: input.path.clone(), row: number, problem })?;
    Ok(Some((format!("{} row {number}", input.path.display()), rendered)))
}

fn of(name: String, rendered: Rendered, tokenizer: &Tokenizer) -> Result<Preview> {
    let encoded = encode(tokenizer, &rendered)?;
    let mut trained: Vec<Range<usize>> = Vec::new();
    for (range, _) in encoded.ranges.iter().zip(&encoded.trained).filter(|(_, trained)| **trained) {
        match trained.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => trained.push(range.clone()),
        }
    }
    let num_trained = encoded.trained.iter().filter(|&&trained| trained).count();
    Ok(Preview { name, text: rendered.text, trained, num_tokens: encoded.ids.len(), num_trained })
}
