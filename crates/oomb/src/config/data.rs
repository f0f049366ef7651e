//! `[data]`: its settings and how they are read and written. It must not know files or tokens.

use super::choices::{DataFormat, LongDocuments, LossOn, Malformed, Packing, TokenizerSource};
use super::error::Result;
use super::read::{Document, Paths, Refusal, Section, Setting, Tokens};
use super::write::{Writer, path, paths, text};
use std::path::PathBuf;
use toml::{Table, Value};

/// `[data]`: what to train on.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSettings {
    /// A folder made by `oomb prepare`, or files (`.jsonl`, `.parquet`, anything else is text; `.gz` and `.zst` are
    /// unpacked), folders and patterns of files, prepared on first use. No default; empty where there are `sources`.
    pub train: Vec<PathBuf>,
    /// `[[data.sources]]`, instead of `train`: several, each with its share of the sequences. Default: none.
    pub sources: Vec<SourceSettings>,
    /// As `train`, for the validation loss. Default: none, then nothing is validated.
    pub validation: Option<Vec<PathBuf>>,
    /// S, in tokens, at least 2. No default: it is what the run is about.
    pub sequence_tokens: usize,
    /// `"bytes"`, a `tokenizer.json`, or a checkpoint folder that has one. Needed for text files only; with a prepared
    /// folder it must be the tokenizer that made it.
    pub tokenizer: Option<TokenizerSource>,
    /// Sequences per optimizer step, one after the other. Default 1: a long sequence is batch enough. The loss is the mean
    /// over all labels of the step.
    pub sequences_per_step: usize,
    /// How documents become sequences. Default `auto`: `concat` for text, so that every sequence is full; `documents` for
    /// conversations, which mean nothing without their beginning.
    pub packing: Packing,
    /// Documents longer than a sequence, where packing keeps documents whole. Default `auto`: `cut` for text, `truncate` for
    /// conversations; refused with `packing = "concat"`, which cuts everything.
    pub long_documents: LongDocuments,
    /// How rows of files become documents.
    pub rows: RowSettings,
}

/// How rows become documents. Needed where files are prepared; what is said here must be true of a prepared folder.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RowSettings {
    /// Text, or conversations. Default `text`.
    pub format: Option<DataFormat>,
    /// The field or column to read. Default `text`, or `messages` for conversations.
    pub field: Option<String>,
    /// Where the chat template is: a checkpoint folder, a `tokenizer_config.json`, or a `.jinja` file. Default: the folder of
    /// the tokenizer.
    pub chat_template: Option<PathBuf>,
    /// Which tokens of a conversation are trained. Default `assistant`: what the model is to say, its end of turn included.
    pub loss_on: Option<LossOn>,
    /// What to do with a row that cannot be used. Default `error`: a file of another form is found at once.
    pub malformed: Option<Malformed>,
}

/// One of `[[data.sources]]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceSettings {
    /// As `data.train`.
    pub paths: Vec<PathBuf>,
    /// Share of the sequences, relative to the other sources; above 0. Default 1.
    pub weight: f64,
    /// `data.format` of this source. Default: that of `[data]`.
    pub format: Option<DataFormat>,
    /// `data.field` of this source. Default: that of `[data]`.
    pub field: Option<String>,
}

impl DataSettings {
    /// `sources`, or `train` as the only one.
    pub fn all_sources(&self) -> Vec<SourceSettings> {
        if !self.sources.is_empty() {
            return self.sources.clone();
        }
        vec![SourceSettings { paths: self.train.clone(), weight: 1.0, format: None, field: None }]
    }

    /// What holds for the rows of `source`.
    pub fn rows_of(&self, source: &SourceSettings) -> RowSettings {
        let mut rows = self.rows.clone();
        rows.format = source.format.or(rows.format);
        rows.field = source.field.clone().or(rows.field);
        rows
    }

    /// Writes the section; what has no setting is left out.
    pub(super) fn write(&self, out: &mut Writer) {
        out.section("data");
        if self.sources.is_empty() {
            out.value("train", paths(&self.train));
        } else {
            out.value("sources", Value::Array(self.sources.iter().map(SourceSettings::to_value).collect()));
        }
        if let Some(validation) = &self.validation {
            out.value("validation", paths(validation));
        }
        out.value("sequence_tokens", self.sequence_tokens);
        match &self.tokenizer {
            Some(TokenizerSource::Bytes) => out.value("tokenizer", text("bytes")),
            Some(TokenizerSource::Path(file)) => out.value("tokenizer", path(file)),
            None => {}
        }
        out.value("sequences_per_step", self.sequences_per_step);
        out.value("packing", text(self.packing));
        if self.packing != Packing::Concat {
            out.value("long_documents", text(self.long_documents));
        }
        let rows = &self.rows;
        let given = [
            ("format", rows.format.map(text)),
            ("field", rows.field.as_ref().map(text)),
            ("chat_template", rows.chat_template.as_deref().map(path)),
            ("loss_on", rows.loss_on.map(text)),
            ("malformed", rows.malformed.map(text)),
        ];
        for (key, value) in given {
            if let Some(value) = value {
                out.value(key, value);
            }
        }
    }
}

/// Reads the section and checks its keys against each other.
pub(super) fn read(document: &Document) -> Result<DataSettings> {
    let section = document.section("data");
    let sources = section.or("sources", Sources(Vec::new()))?.0;
    let train = if sources.is_empty() {
        section.required::<Paths>("train", "name a folder made by `oomb prepare`, or text files")?.0
    } else if section.optional::<Paths>("train")?.is_some() {
        return Err(document.invalid("data", "has both train and sources: make train one of [[data.sources]]"));
    } else {
        Vec::new()
    };
    let packing = section.or("packing", Packing::Auto)?;
    let long_documents = section.optional("long_documents")?;
    if packing == Packing::Concat && long_documents.is_some() {
        let problem = "has no effect with packing = \"concat\", which cuts every document: remove one";
        return Err(document.invalid("data.long_documents", problem));
    }
    let data = DataSettings {
        train,
        sources,
        validation: section.optional::<Paths>("validation")?.map(|paths| paths.0),
        sequence_tokens: section.required::<Tokens>("sequence_tokens", "for example sequence_tokens = \"32K\"")?.0,
        tokenizer: section.optional("tokenizer")?,
        sequences_per_step: section.or("sequences_per_step", 1)?,
        packing,
        long_documents: long_documents.unwrap_or_default(),
        rows: read_rows(&section)?,
    };
    let chat = |format: Option<DataFormat>| format == Some(DataFormat::Chat);
    let any_chat = chat(data.rows.format) || data.sources.iter().any(|source| chat(source.format));
    for (key, given) in [("chat_template", data.rows.chat_template.is_some()), ("loss_on", data.rows.loss_on.is_some())] {
        if given && !any_chat {
            let problem = "is for conversations: set data.format = \"chat\", or remove it";
            return Err(document.invalid(&format!("data.{key}"), problem));
        }
    }
    Ok(data)
}

fn read_rows(section: &Section<'_>) -> Result<RowSettings> {
    Ok(RowSettings {
        format: section.optional("format")?,
        field: section.optional("field")?,
        chat_template: section.optional("chat_template")?,
        loss_on: section.optional("loss_on")?,
        malformed: section.optional("malformed")?,
    })
}

/// `[[data.sources]]`
struct Sources(Vec<SourceSettings>);

impl Setting for Sources {
    const WANTED: &'static str = "sections: write [[data.sources]] and paths = \"…\", weight = 1.0 below it";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        let tables = value.as_array().ok_or(Refusal::WrongType)?;
        if tables.is_empty() {
            return Err(Refusal::Because("is empty: write at least one [[data.sources]]".to_owned()));
        }
        let read = |table: &Value| SourceSettings::read(table.as_table().ok_or(Refusal::WrongType)?);
        tables.iter().map(read).collect::<std::result::Result<_, _>>().map(Self)
    }
}

impl SourceSettings {
    fn read(table: &Table) -> std::result::Result<Self, Refusal> {
        const KEYS: [&str; 4] = ["paths", "weight", "format", "field"];
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            let near = super::nearest(key, KEYS.into_iter());
            let hint = near.map_or_else(|| format!("it has {}", KEYS.join(", ")), |near| format!("did you mean `{near}`?"));
            return Err(Refusal::Because(format!("has an unknown key `{key}`; {hint}")));
        }
        let paths = table.get("paths").ok_or_else(|| Refusal::Because("has no paths: write paths = \"…\"".to_owned()))?;
        let weight = one::<f64>(table, "weight")?.unwrap_or(1.0);
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(Refusal::Because(format!("has weight = {weight}, which must be above 0")));
        }
        let paths = named::<Paths>("paths", paths)?.0;
        Ok(Self { paths, weight, format: one(table, "format")?, field: one(table, "field")? })
    }

    fn to_value(&self) -> Value {
        let mut table = Table::new();
        table.insert("paths".to_owned(), paths(&self.paths));
        table.insert("weight".to_owned(), Value::Float(self.weight));
        if let Some(format) = self.format {
            table.insert("format".to_owned(), text(format));
        }
        if let Some(field) = &self.field {
            table.insert("field".to_owned(), text(field));
        }
        Value::Table(table)
    }
}

fn one<T: Setting>(table: &Table, key: &str) -> std::result::Result<Option<T>, Refusal> {
    table.get(key).map(|value| named(key, value)).transpose()
}

/// Reads a value of an inner table, whose key an error must name.
fn named<T: Setting>(key: &str, value: &Value) -> std::result::Result<T, Refusal> {
    T::read(value).map_err(|refusal| match refusal {
        Refusal::WrongType => Refusal::Because(format!("has {key} = {value}, which must be {}", T::WANTED)),
        Refusal::Because(problem) => Refusal::Because(format!("has {key}, which {problem}")),
    })
}
