//! `data.train` and its kin: a prepared folder, or text that is prepared on first use. It must not know runs.

use super::chat::ChatTemplate;
use super::dataset::Dataset;
use super::error::{Error, Result};
use super::index::{Recipe, is_prepared};
use super::input::{Content, Input, list_inputs};
use super::pieces::fingerprint;
use super::prepare::{Advance, Existing, PrepareRequest, prepare};
use super::reading::Reading;
use super::tokenizer::Tokenizer;
use crate::config::{DataFormat, Malformed, RowSettings, TokenizerSource};
use std::path::{Path, PathBuf};

/// Where data comes from.
pub struct Source<'a> {
    /// One prepared folder, or files, folders of files and patterns of files.
    pub paths: &'a [PathBuf],
    /// For text; where it is given with a prepared folder it must be the one that made it.
    pub tokenizer: Option<&'a TokenizerSource>,
    /// How rows become documents; what is said here must be true of a prepared folder.
    pub rows: &'a RowSettings,
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
        check_recipe(source.rows, &dataset)?;
        return Ok(dataset);
    }
    let inputs = list_inputs(source.paths)?;
    let Some(tokenizer) = tokenizer else {
        return Err(Error::NoTokenizer { path: inputs.into_iter().next().map(|input| input.path).unwrap_or_default() });
    };
    let reading = Reading::load(source.rows, &tokenizer)?;
    let out = source.prepared_in.join(content_name(&inputs, &tokenizer, reading.recipe())?);
    let (inputs, existing) = (source.paths, Existing::Keep);
    let request = PrepareRequest { inputs, out: &out, tokenizer: &tokenizer, reading: &reading, existing };
    Ok(prepare(&request, report)?.into_dataset())
}

/// Refuses a prepared folder that was made in another way than is said.
fn check_recipe(rows: &RowSettings, dataset: &Dataset) -> Result<()> {
    let recipe = &dataset.index().recipe;
    let mut said = vec![
        ("format", rows.format.map(|format| format.to_string()), recipe.format.to_string()),
        ("field", rows.field.clone(), recipe.field.clone()),
    ];
    // What is said of conversations says nothing of text, which may be another source of the same run.
    if recipe.format == DataFormat::Chat {
        let template = rows.chat_template.as_deref().map(|path| ChatTemplate::load(Some(path), None)).transpose()?;
        let crc = |crc: u32| format!("a template of CRC {crc:08x}");
        let made = recipe.chat_template_crc32.map_or_else(String::new, crc);
        said.push(("chat_template", template.map(|template| crc(template.crc32())), made));
        said.push(("loss_on", rows.loss_on.map(|loss_on| loss_on.to_string()), recipe.loss_on.to_string()));
    }
    // A folder that was made without an error has nothing malformed to skip.
    if recipe.malformed == Malformed::Skip {
        let given = rows.malformed.map(|malformed| malformed.to_string());
        said.push(("malformed", given, recipe.malformed.to_string()));
    }
    for (key, given, made) in said {
        if let Some(given) = given.filter(|given| *given != made) {
            return Err(Error::OtherRecipe { path: dataset.folder().to_path_buf(), key, made, given });
        }
    }
    Ok(())
}

/// The first file's stem and a checksum over all text, the tokenizer, and how rows become documents.
fn content_name(inputs: &[Input], tokenizer: &Tokenizer, recipe: &Recipe) -> Result<String> {
    let mut crc = crc32fast::Hasher::new();
    for input in inputs {
        let (content, num_bytes) = fingerprint(&input.path)?;
        crc.update(&content.to_le_bytes());
        crc.update(&num_bytes.to_le_bytes());
    }
    crc.update(tokenizer.identity().to_string().as_bytes());
    if inputs.iter().any(|input| input.content != Content::Text) || recipe.format != DataFormat::Text {
        crc.update(format!("{recipe:?}").as_bytes());
    }
    let stem = inputs
        .first()
        .and_then(|input| input.path.file_stem())
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    Ok(format!("{stem}-{:08x}", crc.finalize()))
}
