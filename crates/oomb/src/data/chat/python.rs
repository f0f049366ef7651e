//! How Python prints: `json.dumps`, `repr` and `str` of the values that JSON has. It must not know templates.

use minijinja::Value;
use minijinja::value::ValueKind;

/// Arguments of `json.dumps`.
pub(super) struct JsonStyle {
    /// Spaces per level, each item on its own line.
    pub(super) indent: Option<usize>,
    /// Between items.
    pub(super) item: String,
    /// Between key and value.
    pub(super) key: String,
    /// Whether keys are sorted.
    pub(super) sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, …)`
pub(super) fn json(value: &serde_json::Value, style: &JsonStyle) -> String {
    let mut out = String::new();
    write_json(&mut out, value, style, 0);
    out
}

fn write_json(out: &mut String, value: &serde_json::Value, style: &JsonStyle, level: usize) {
    match value {
        serde_json::Value::Number(number) => *out += &json_number(number),
        serde_json::Value::Array(items) => {
            let items = items.iter().map(|item| (None, item)).collect();
            write_items(out, ['[', ']'], items, style, level);
        }
        serde_json::Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().map(|(name, field)| (Some(name), field)).collect();
            if style.sort_keys {
                fields.sort_by_key(|(name, _)| *name);
            }
            write_items(out, ['{', '}'], fields, style, level);
        }
        // Strings, null and booleans are the same in both; Python writes the delete character as it is, and so does this.
        other => *out += &other.to_string(),
    }
}

fn write_items(
    out: &mut String,
    [open, close]: [char; 2],
    items: Vec<(Option<&String>, &serde_json::Value)>,
    style: &JsonStyle,
    level: usize,
) {
    let line = |level: usize| style.indent.map_or_else(String::new, |indent| format!("\n{}", " ".repeat(indent * level)));
    out.push(open);
    let num_items = items.len();
    for (index, (name, item)) in items.into_iter().enumerate() {
        *out += &line(level + 1);
        if let Some(name) = name {
            *out += &serde_json::Value::from(name.as_str()).to_string();
            *out += &style.key;
        }
        write_json(out, item, style, level + 1);
        if index + 1 < num_items {
            *out += &style.item;
        }
    }
    if num_items > 0 {
        *out += &line(level);
    }
    out.push(close);
}

fn json_number(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(value) if number.is_f64() => float(value),
        _ => number.to_string(),
    }
}

/// `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if value == 0.0 || (1e-4..1e16).contains(&value.abs()) {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => text,
    }
}

/// `str(value)`
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value),
    }
}

/// `repr(value)`
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => float(number),
            _ => value.to_string(),
        },
        ValueKind::String => repr_of_text(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let field = |key: Value| {
                let item = value.get_item(&key).unwrap_or(Value::UNDEFINED);
                format!("{}: {}", repr(&key), repr(&item))
            };
            format!("{{{}}}", keys.map(field).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn repr_of_text(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => out += "\\n",
            '\r' => out += "\\r",
            '\t' => out += "\\t",
            '\\' => out += "\\\\",
            _ if character == quote => out.extend(['\\', quote]),
            _ if character.is_control() && (character as u32) < 0x100 => out += &format!("\\x{:02x}", character as u32),
            _ => out.push(character),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The right-hand sides are what Python 3.11 prints.
    #[test]
    fn prints_as_python_does() {
        for (value, wanted) in [(1.0, "1.0"), (0.1, "0.1"), (1e16, "1e+16"), (123e20, "1.23e+22"), (5e-5, "5e-05"), (0.0, "0.0")]
        {
            assert_eq!(float(value), wanted);
        }
        let value = serde_json::json!({"b": [1, 2.5, null, true, "it's"], "a": {}, "c": []});
        let plain = JsonStyle { indent: None, item: ", ".to_owned(), key: ": ".to_owned(), sort_keys: false };
        assert_eq!(json(&value, &plain), r#"{"b": [1, 2.5, null, true, "it's"], "a": {}, "c": []}"#);
        let sorted = JsonStyle { indent: Some(2), item: ",".to_owned(), key: ": ".to_owned(), sort_keys: true };
        let wanted = "{\n  \"a\": {},\n  \"b\": [\n    1,\n    2.5,\n    null,\n    true,\n    \"it's\"\n  ],\n  \"c\": []\n}";
        assert_eq!(json(&value, &sorted), wanted);
        let wanted = r#"{'b': [1, 2.5, None, True, "it's"], 'a': {}, 'c': []}"#;
        assert_eq!(text(&Value::from(minijinja::value::Serde(&value))), wanted);
    }
}
