//! The functions and filters that chat templates are written for: those of transformers' `apply_chat_template`. It must not
//! know messages.

use super::python;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

/// As transformers makes it: whitespace around tags is dropped, nothing is escaped, and values print as in Python.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are the default ones"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| {
        if value.is_undefined() {
            return Ok(());
        }
        out.write_str(&value.as_str().map_or_else(|| python::text(value), str::to_owned)).map_err(Error::from)
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, Error> {
    use std::fmt::Write as _;
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(&format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("{format:?} is no format of a date")))?;
    Ok(text)
}

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`
fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson wants two separators")),
    };
    let value = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, "tojson: not a value of JSON").with_source(e))?;
    let style = python::JsonStyle { indent, item, key, sort_keys: sort_keys.unwrap_or(false) };
    Ok(Value::from_safe_string(python::json(&value, &style)))
}
