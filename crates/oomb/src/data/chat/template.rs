//! A checkpoint's chat template and the special tokens it names. It must not know which tokens are trained.

use super::environment::environment;
use crate::data::error::{Error, Result};
use minijinja::Environment;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Name of the template that is used where there are tools and a checkpoint has several.
const TOOL_USE: &str = "tool_use";
/// Name of the template that is used otherwise.
const DEFAULT: &str = "default";
/// Stand for the ends of `{% generation %}` in what a template renders: two code points that are no characters.
pub(super) const MARKS: [char; 2] = ['\u{10FFFE}', '\u{10FFFF}'];
/// Special tokens that a template may name, as `tokenizer_config.json` has them.
const SPECIAL_TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A chat template, as transformers would render it.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Names of templates, with whether they mark what the assistant says.
    templates: Vec<(String, bool)>,
    special_tokens: Map<String, Value>,
    crc32: u32,
}

impl ChatTemplate {
    /// Loads the template of a checkpoint: `chat_template.jinja` in `path`, or `chat_template` in its
    /// `tokenizer_config.json`, which also names the special tokens. `path` is the folder or either file; where nothing is
    /// given, the folder of `tokenizer`, a `tokenizer.json`.
    ///
    /// # Errors
    /// If there is none, or it is not a template.
    pub fn load(path: Option<&Path>, tokenizer: Option<&Path>) -> Result<Self> {
        let beside = tokenizer.and_then(Path::parent);
        let Some(path) = path.or(beside) else {
            let detail = "the byte tokenizer has none: set data.chat_template (--chat-template)".to_owned();
            return Err(Error::Template { path: PathBuf::from("none"), detail });
        };
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let config = match path.extension() {
            Some(end) if end == "json" => path.to_path_buf(),
            _ => folder.join("tokenizer_config.json"),
        };
        let config = read_config(&config)?;
        let mut sources = Vec::new();
        let own = folder.join("chat_template.jinja");
        if path.extension().is_some_and(|end| end != "json") && path.is_file() {
            sources.push((DEFAULT.to_owned(), read_text(path)?));
        } else if path.is_dir() && own.is_file() {
            sources.push((DEFAULT.to_owned(), read_text(&own)?));
        } else {
            sources.extend(of_config(path, config.get("chat_template"))?);
        }
        let special_tokens = special_tokens(&config);
        Self::new(path, sources, special_tokens)
    }

    fn new(path: &Path, sources: Vec<(String, String)>, special_tokens: Map<String, Value>) -> Result<Self> {
        let mut crc = crc32fast::Hasher::new();
        let mut environment = environment();
        let mut templates = Vec::new();
        for (name, source) in sources {
            crc.update(source.as_bytes());
            let (source, marks) = mark_generation(&source);
            environment.add_template_owned(name.clone(), source).map_err(|error| {
                let detail = format!("cannot be read: {}", describe(&error));
                Error::Template { path: path.to_path_buf(), detail }
            })?;
            templates.push((name, marks));
        }
        crc.update(Value::Object(special_tokens.clone()).to_string().as_bytes());
        Ok(Self { environment, templates, special_tokens, crc32: crc.finalize() })
    }

    /// Of the template and its special tokens.
    pub(crate) fn crc32(&self) -> u32 {
        self.crc32
    }

    /// The special tokens that the checkpoint names.
    pub(super) fn special_tokens(&self) -> impl Iterator<Item = &str> {
        self.special_tokens.values().filter_map(Value::as_str)
    }

    /// Whether the template says itself what the assistant says.
    pub(super) fn marks_generation(&self, tools: Option<&Value>) -> bool {
        self.template_for(tools).1
    }

    /// Renders messages. With `add_generation_prompt` the text ends where the assistant begins.
    ///
    /// # Errors
    /// What the template refused.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        let text = self.render_marked(messages, tools, add_generation_prompt)?;
        Ok(if self.marks_generation(tools) { text.replace(MARKS, "") } else { text })
    }

    /// The same with [`MARKS`] where the template marks what the assistant says.
    pub(super) fn render_marked(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        let mut context = Map::new();
        context.insert("messages".to_owned(), Value::Array(messages.to_vec()));
        // transformers passes both, as none where they are not given.
        context.insert("tools".to_owned(), tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".to_owned(), Value::Null);
        context.insert("add_generation_prompt".to_owned(), Value::Bool(add_generation_prompt));
        context.extend(self.special_tokens.clone());
        let (name, _) = self.template_for(tools);
        let template = self.environment.get_template(name).map_err(|error| describe(&error))?;
        template
            .render(minijinja::Value::from(minijinja::value::Serde(context)))
            .map_err(|error| format!("the chat template refuses it: {}", describe(&error)))
    }

    fn template_for(&self, tools: Option<&Value>) -> &(String, bool) {
        let named = |wanted: &str| self.templates.iter().find(|(name, _)| name == wanted);
        let for_tools = tools.and_then(|_| named(TOOL_USE));
        for_tools.or_else(|| named(DEFAULT)).or_else(|| self.templates.first()).expect("there is at least one template")
    }
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}

fn read_config(path: &Path) -> Result<Map<String, Value>> {
    if !path.is_file() {
        return Ok(Map::new());
    }
    serde_json::from_str(&read_text(path)?)
        .map_err(|e| Error::Template { path: path.to_path_buf(), detail: format!("not a JSON object: {e}") })
}

/// `chat_template`: one, or a list of named ones.
fn of_config(path: &Path, given: Option<&Value>) -> Result<Vec<(String, String)>> {
    let wrong = |detail: &str| Err(Error::Template { path: path.to_path_buf(), detail: detail.to_owned() });
    match given {
        Some(Value::String(source)) => Ok(vec![(DEFAULT.to_owned(), source.clone())]),
        Some(Value::Array(list)) => {
            let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let named = list.iter().map(|entry| text(entry, "name").zip(text(entry, "template"))).collect::<Option<Vec<_>>>();
            match named {
                Some(named) if !named.is_empty() => Ok(named),
                _ => wrong("\"chat_template\" must be a string, or a list of names and templates"),
            }
        }
        Some(_) => wrong("\"chat_template\" must be a string, or a list of names and templates"),
        None => wrong(
            "there is neither a chat_template.jinja nor a \"chat_template\" in tokenizer_config.json; a base model has none: \
             name another with data.chat_template (--chat-template)",
        ),
    }
}

/// The special tokens that are set: strings, or objects with their text in `content`.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    let named = SPECIAL_TOKENS.iter().filter_map(|&name| Some((name.to_owned(), Value::String(text(config.get(name)?)?))));
    named.collect()
}

/// Puts [`MARKS`] in place of `{% generation %}` and `{% endgeneration %}`, as tags that treat the whitespace around them
/// alike; whether there were any.
fn mark_generation(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        let (open, inner) = match tag.chars().next() {
            Some(sign @ ('-' | '+')) => (format!("{{%{sign}"), &tag[1..]),
            _ => ("{%".to_owned(), tag),
        };
        let (close, inner) = match inner.chars().last() {
            Some(sign @ ('-' | '+')) => (format!("{sign}%}}"), &inner[..inner.len() - 1]),
            _ => ("%}".to_owned(), inner),
        };
        let mark = match inner.trim() {
            "generation" => Some(MARKS[0]),
            "endgeneration" => Some(MARKS[1]),
            _ => None,
        };
        let end = start + length + 2;
        match mark {
            Some(mark) => {
                found = true;
                out += &rest[..start];
                out += &format!("{open} if true %}}{mark}{{% endif {close}");
            }
            None => out += &rest[..end],
        }
        rest = &rest[end..];
    }
    out += rest;
    (out, found)
}

/// An error of a template without the dump of its source.
fn describe(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or(detail.clone(), |line| format!("{detail} (line {line} of the template)"))
}
