//! Conversations to tokens: rendered by a chat template, with what the assistant says marked to be trained. It must not know
//! files of rows or shards.

mod environment;
mod python;
mod spans;
mod template;

pub use template::ChatTemplate;

use super::tokenizer::Tokenizer;
use crate::config::LossOn;
use serde_json::{Map, Value};
use std::ops::Range;

/// A conversation as text, and which bytes of it are trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// What the template made.
    pub text: String,
    /// Ascending byte ranges that do not touch.
    pub trained: Vec<Range<usize>>,
}

/// A document with a flag per token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The bytes of the text that each token stands for; those of several tokens for one character are the character's.
    pub ranges: Vec<Range<usize>>,
    /// Whether the token is trained to be predicted.
    pub trained: Vec<bool>,
}

/// Renders the conversation in `row[field]`, with `row["tools"]` where there are any.
///
/// # Errors
/// What is wrong with the row, for a person: a missing field, what the template refuses, or a template whose assistant
/// turns cannot be told apart.
pub fn render(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    row: &Map<String, Value>,
    field: &str,
    loss_on: LossOn,
) -> std::result::Result<Rendered, String> {
    let messages = match row.get(field) {
        Some(Value::Array(messages)) => messages,
        Some(other) => return Err(format!("field `{field}` must be a list of messages, got {}", kind_of(other))),
        None => return Err(missing_field(row, field)),
    };
    let messages: Vec<Value> = messages.iter().map(without_nulls).collect();
    for (index, message) in messages.iter().enumerate() {
        if message.get("role").and_then(Value::as_str).is_none() {
            return Err(format!("message {} has no `role`", index + 1));
        }
    }
    let tools = tools_of(row)?;
    match loss_on {
        LossOn::All => {
            let text = template.render(&messages, tools.as_ref(), false)?;
            let all = 0..text.len();
            Ok(Rendered { trained: if all.is_empty() { Vec::new() } else { vec![all] }, text })
        }
        LossOn::Assistant => spans::assistant_spans(template, tokenizer, &messages, tools.as_ref()),
    }
}

/// Tokens of a rendered conversation. A token is trained if any of its bytes is.
///
/// # Errors
/// If the tokenizer refuses the text.
pub fn encode(tokenizer: &Tokenizer, rendered: &Rendered) -> super::Result<Encoded> {
    let (ids, ranges) = tokenizer.encode_with_ranges(&rendered.text)?;
    let is_trained = |token: &Range<usize>| {
        let span = rendered.trained.partition_point(|span| span.end <= token.start);
        rendered.trained.get(span).is_some_and(|span| span.start < token.end)
    };
    let trained = ranges.iter().map(is_trained).collect();
    Ok(Encoded { ids, ranges, trained })
}

/// "has no field `text`; it has …"
pub(super) fn missing_field(row: &Map<String, Value>, field: &str) -> String {
    let names: Vec<&str> = row.keys().map(String::as_str).collect();
    format!("there is no field `{field}`: it has {}; name one with data.field (--field)", names.join(", "))
}

/// "a number", as an error names what it got.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// `tools`, as a list or as JSON in a string, the two forms in which data sets have it.
fn tools_of(row: &Map<String, Value>) -> std::result::Result<Option<Value>, String> {
    match row.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(tools)) if tools.is_empty() => Ok(None),
        Some(Value::Array(tools)) => Ok(Some(Value::Array(tools.clone()))),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Array(tools)) => Ok((!tools.is_empty()).then_some(Value::Array(tools))),
            _ => Err("field `tools` must be a list, or a list as JSON in a string".to_owned()),
        },
        Some(other) => Err(format!("field `tools` must be a list, got {}", kind_of(other))),
    }
}

/// Data sets often write a message's missing fields as null, and templates ask whether they are there.
fn without_nulls(message: &Value) -> Value {
    let Value::Object(fields) = message else { return message.clone() };
    let fields = fields.iter().filter(|(name, value)| !value.is_null() || name.as_str() == "content");
    Value::Object(fields.map(|(name, value)| (name.clone(), value.clone())).collect())
}
