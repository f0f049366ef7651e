//! Which part of a rendered conversation the assistant says: by the template's own marks, or by rendering the conversation
//! up to each turn. It must not know tokens' ids.

use super::Rendered;
use super::template::{ChatTemplate, MARKS};
use crate::data::tokenizer::Tokenizer;
use serde_json::Value;
use std::ops::Range;

/// Renders a conversation with the bytes that the assistant says.
///
/// A template with `{% generation %}` marks them itself. For one without, a turn is what rendering up to and with it adds
/// to rendering up to it with the generation prompt; both must be the beginning of the whole, or nothing is known. What a
/// template puts behind the special token that ends the turn (a line break, mostly) belongs to no turn: a model stops before
/// it.
///
/// # Errors
/// What the template refused, or that the turns cannot be told apart.
pub(super) fn assistant_spans(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Value],
    tools: Option<&Value>,
) -> Result<Rendered, String> {
    if template.marks_generation(tools) {
        return marked(&template.render_marked(messages, tools, false)?);
    }
    let text = template.render(messages, tools, false)?;
    let mut trained: Vec<Range<usize>> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if message.get("role").and_then(Value::as_str) != Some("assistant") {
            continue;
        }
        let before = template.render(&messages[..index], tools, true).map_err(|problem| cannot_tell(index, &problem))?;
        let with = template.render(&messages[..=index], tools, false).map_err(|problem| cannot_tell(index, &problem))?;
        let differs = "what stands before and in it is rendered otherwise in the whole conversation";
        if !with.starts_with(&before) || !text.starts_with(&with) {
            return Err(cannot_tell(index, differs));
        }
        let end = end_of_turn(&with[before.len()..], template, tokenizer) + before.len();
        match trained.last_mut() {
            Some(last) if last.end == before.len() => last.end = end,
            _ if before.len() < end => trained.push(before.len()..end),
            _ => {}
        }
    }
    Ok(Rendered { text, trained })
}

fn cannot_tell(index: usize, problem: &str) -> String {
    format!(
        "message {}: cannot tell where the assistant's turn is in the rendered text: {problem}; use a chat template with \
         {{% generation %}} around it, or data.loss_on = \"all\"",
        index + 1
    )
}

/// Length of a turn up to the special token that ends it, or all of it.
fn end_of_turn(turn: &str, template: &ChatTemplate, tokenizer: &Tokenizer) -> usize {
    let body = turn.trim_end();
    let special = |text: &str| !text.is_empty() && body.ends_with(text);
    if template.special_tokens().any(special) || tokenizer.special_tokens().iter().any(|text| special(text)) {
        body.len()
    } else {
        turn.len()
    }
}

fn marked(text: &str) -> Result<Rendered, String> {
    let (mut plain, mut trained, mut open) = (String::with_capacity(text.len()), Vec::new(), None);
    for part in text.split_inclusive(MARKS) {
        let mark = part.chars().last().filter(|last| MARKS.contains(last));
        plain += part.trim_end_matches(MARKS);
        match (mark, open) {
            (None, _) => {}
            (Some(mark), None) if mark == MARKS[0] => open = Some(plain.len()),
            (Some(mark), Some(start)) if mark == MARKS[1] => {
                open = None;
                if start < plain.len() {
                    trained.push(start..plain.len());
                }
            }
            _ => return Err("the chat template's {% generation %} marks do not pair up".to_owned()),
        }
    }
    Ok(Rendered { text: plain, trained })
}
