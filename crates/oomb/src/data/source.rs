//! `data.train` and its kin: a prepared folder, or text that is prepared on first use. It must not know runs.

use super::dataset::{Dataset, is_prepared};
use super::error::{Error, Result};
use super::pieces::fingerprint;
use super::prepare::{Advance, Existing, PrepareRequest, list_inputs, prepare};
use super::tokenizer::Tokenizer;
use crate::config::TokenizerSource;
use std::path::{Path, PathBuf};

/// Where data comes from.
pub struct Source<'a> {
    /// One prepared folder, or text files and folders of `.txt` files.
    pub paths: &'a [PathBuf],
    /// For text; where it is given with a prepared folder it must be the one that made it.
    pub tokenizer: Option<&'a TokenizerSource>,
    /// Text is prepared into a folder in here, named after its content, and found there the next time.
    pub prepared_in: &'a Path,
}

/// Opens a prepared folder; prepares text first, unless that was done before.
///
/// # Errors
/// As [`Dataset::open`] and [`prepare`], and if the tokenizer is missing or is not the one that made the folder.
pub fn open_source(source: &Source<'_>, report: &mut dyn FnMut(Advance)) -> Result<Dataset> {
    let tokenizer = source.tokenizer.map(Tokenizer::load).transpose()?;
    if let Some(folder) = source.paths.iter().find(|path| is_prepared(path)) {
        if source.paths.len() > 1 {
            return Err(Error::MixedSources { path: folder.clone(), count: source.paths.len() });
        }
        let dataset = Dataset::open(folder)?;
        if let Some(tokenizer) = tokenizer.filter(|tokenizer| *tokenizer.identity() != dataset.index().tokenizer) {
            let (made, given) = (dataset.index().tokenizer.to_string(), tokenizer.identity().to_string());
            return Err(Error::OtherTokenizer { path: folder.clone(), made, given });
        }
        return Ok(dataset);
    }
    let inputs = list_inputs(source.paths)?;
    let Some(tokenizer) = tokenizer else {
        return Err(Error::NoTokenizer { path: inputs.into_iter().next().unwrap_or_default() });
    };
    let out = source.prepared_in.join(content_name(&inputs, &tokenizer)?);
    let request = PrepareRequest { inputs: source.paths, out: &out, tokenizer: &tokenizer, existing: Existing::Keep };
    Ok(prepare(&request, report)?.into_dataset())
}

/// The first file's stem and a checksum over all text and the tokenizer.
fn content_name(inputs: &[PathBuf], tokenizer: &Tokenizer) -> Result<String> {
    let mut crc = crc32fast::Hasher::new();
    for input in inputs {
        let (content, num_bytes) = fingerprint(input)?;
        crc.update(&content.to_le_bytes());
        crc.update(&num_bytes.to_le_bytes());
    }
    crc.update(tokenizer.identity().to_string().as_bytes());
    let stem =
        inputs.first().and_then(|path| path.file_stem()).map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    Ok(format!("{stem}-{:08x}", crc.finalize()))
}
