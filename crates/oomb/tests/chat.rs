//! Conversations against transformers: rendered text, tokens and masks (scripts/chat_golden.py), and what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::{LossOn, TokenizerSource};
use oomb::data::Tokenizer;
use oomb::data::chat::{ChatTemplate, encode, render};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Case {
    template: String,
    special: Map<String, Value>,
    conversation: String,
    messages: Value,
    tools: Option<Value>,
    text: String,
    prompt: String,
    ids: Vec<u32>,
    trained: Vec<u8>,
}

impl Case {
    fn row(&self) -> Map<String, Value> {
        let mut row = Map::new();
        row.insert("messages".to_owned(), self.messages.clone());
        row.extend(self.tools.iter().map(|tools| ("tools".to_owned(), tools.clone())));
        row
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_chat")
}

fn cases() -> Vec<Case> {
    serde_json::from_str(&fs::read_to_string(golden().join("golden.json")).unwrap()).unwrap()
}

/// A checkpoint folder as far as a chat needs one.
fn checkpoint(template: &str, special: &Map<String, Value>) -> (tempfile::TempDir, Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let mut config = special.clone();
    config.insert("chat_template".to_owned(), Value::from(template));
    fs::write(folder.path().join("tokenizer_config.json"), Value::from(config).to_string()).unwrap();
    let tokenizer = Tokenizer::load(&TokenizerSource::Path(folder.path().to_path_buf())).unwrap();
    (folder, tokenizer)
}

fn of_golden(name: &str, special: &Map<String, Value>) -> (tempfile::TempDir, Tokenizer, ChatTemplate) {
    let source = fs::read_to_string(golden().join(format!("{name}.jinja"))).unwrap();
    let (folder, tokenizer) = checkpoint(&source, special);
    let template = ChatTemplate::load(None, tokenizer.file()).unwrap();
    (folder, tokenizer, template)
}

#[test]
fn text_tokens_and_masks_are_those_of_transformers() {
    let cases = cases();
    for name in ["smollm2", "qwen2.5", "llama-3.1", "marked"] {
        assert!(cases.iter().filter(|case| case.template == name).count() >= 7, "{name}");
    }
    for case in &cases {
        let (_folder, tokenizer, template) = of_golden(&case.template, &case.special);
        let what = format!("{}, {}", case.template, case.conversation);
        let rendered = render(&template, &tokenizer, &case.row(), "messages", LossOn::Assistant).expect(&what);
        assert_eq!(rendered.text, case.text, "{what}");
        let encoded = encode(&tokenizer, &rendered).unwrap();
        assert_eq!(encoded.ids, case.ids, "{what}");
        let trained: Vec<u8> = encoded.trained.iter().map(|&trained| u8::from(trained)).collect();
        assert_eq!(trained, case.trained, "{what}");
        let prompt = template.render(case.messages.as_array().unwrap(), case.tools.as_ref(), true).unwrap();
        assert_eq!(prompt, case.prompt, "{what}");
        let all = render(&template, &tokenizer, &case.row(), "messages", LossOn::All).expect(&what);
        assert!(all.text == case.text && encode(&tokenizer, &all).unwrap().trained.iter().all(|&trained| trained), "{what}");
    }
}

/// Renders a conversation by a template of one's own; byte tokens would do, but special tokens are part of it.
fn try_render(template: &str, messages: Value) -> Result<Vec<String>, String> {
    let special = Map::from_iter([("eos_token".to_owned(), json!("<|im_end|>"))]);
    let (_folder, tokenizer) = checkpoint(template, &special);
    let template = ChatTemplate::load(None, tokenizer.file()).map_err(|error| error.to_string())?;
    let row = Map::from_iter([("messages".to_owned(), messages)]);
    let rendered = render(&template, &tokenizer, &row, "messages", LossOn::Assistant)?;
    Ok(rendered.trained.iter().map(|span| rendered.text[span.clone()].to_owned()).collect())
}

fn talk() -> Value {
    json!([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye"}])
}

#[test]
fn what_stands_behind_the_end_of_a_turn_is_not_trained() {
    let turns =
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let with = |end: &str| try_render(&turns.replace("END", end), talk()).unwrap();
    assert_eq!(with("{{ eos_token }}\n "), ["Hi<|im_end|>", "Bye<|im_end|>"]);
    assert_eq!(with("<|eot_id|>\n"), ["Hi<|eot_id|>", "Bye<|eot_id|>"], "special to the tokenizer, not to the template");
    assert_eq!(with("\n"), ["Hi\n", "Bye\n"], "no special token: the line break may be what ends a turn");
}

#[test]
fn conversations_that_are_refused() {
    // As Qwen3 does: earlier turns lose what the last one shows.
    let forgetful = "{% for m in messages %}{{ m.role }}: {% if loop.last %}<think>{% endif %}{{ m.content }}\n{% endfor %}";
    insta::assert_snapshot!(try_render(forgetful, talk()).unwrap_err(), @r#"message 2: cannot tell where the assistant's turn is in the rendered text: what stands before and in it is rendered otherwise in the whole conversation; use a chat template with {% generation %} around it, or data.loss_on = "all""#);
    let qwen = fs::read_to_string(golden().join("qwen2.5.jinja")).unwrap();
    insta::assert_snapshot!(try_render(&qwen, json!([{"role": "assistant", "content": "Me first"}])).unwrap_err(), @r#"message 1: cannot tell where the assistant's turn is in the rendered text: the chat template refuses it: `messages[0]` is undefined (line 15 of the template); use a chat template with {% generation %} around it, or data.loss_on = "all""#);
    let strict = "{% for m in messages %}\n{% if m.role == 'assistant' and loop.first %}{{ raise_exception('The user speaks first') }}{% endif %}{% endfor %}";
    insta::assert_snapshot!(try_render(strict, json!([{"role": "assistant", "content": "Me"}])).unwrap_err(), @"the chat template refuses it: The user speaks first (line 2 of the template)");
    let unreadable = try_render("{% if %}", talk()).unwrap_err();
    assert!(unreadable.ends_with("cannot be read: unexpected end of block (line 1 of the template)"), "{unreadable}");
    insta::assert_snapshot!(try_render("{% for m in messages %}{% endgeneration %}{% endfor %}", talk()).unwrap_err(), @"the chat template's {% generation %} marks do not pair up");
    insta::assert_snapshot!(try_render("{{ messages[0].content + missing }}", talk()).unwrap_err(), @"the chat template refuses it: tried to use + operator on unsupported types string and undefined (`missing` is undefined) (line 1 of the template)");
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let special = Map::from_iter([("bos_token".to_owned(), json!({"content": "<|im_start|>", "special": true}))]);
    let (folder, tokenizer) = checkpoint("{{ bos_token }}in the configuration", &special);
    let load = |path: Option<&Path>| ChatTemplate::load(path, tokenizer.file());
    let text = |path: Option<&Path>, tools: Option<&Value>| load(path).unwrap().render(&[], tools, false).unwrap();
    assert_eq!(text(None, None), "<|im_start|>in the configuration");
    fs::write(folder.path().join("chat_template.jinja"), "{{ bos_token }}in a file\n").unwrap();
    assert_eq!(text(None, None), "<|im_start|>in a file", "the last line break of a template is not part of it");
    let config = folder.path().join("tokenizer_config.json");
    assert_eq!(text(Some(&config), None), "<|im_start|>in the configuration");
    let named = json!({"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
    fs::write(&config, named.to_string()).unwrap();
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    assert_eq!((text(None, None), text(None, Some(&json!([{}])))), ("plain".to_owned(), "tools".to_owned()));
    fs::write(&config, "{}").unwrap();
    let error = load(None).err().unwrap().to_string().replace(&folder.path().display().to_string(), "DIR");
    insta::assert_snapshot!(error, @r#"chat template DIR: there is neither a chat_template.jinja nor a "chat_template" in tokenizer_config.json; a base model has none: name another with data.chat_template (--chat-template)"#);
}

/// What templates in use call beside what the golden ones do.
#[test]
fn python_s_habits_are_known() {
    let print = |template: &str| {
        let special = Map::new();
        let (_folder, tokenizer) = checkpoint(template, &special);
        let messages = [json!({"role": "user", "content": null, "n": 1.0, "list": ["a", true, null]})];
        ChatTemplate::load(None, tokenizer.file()).unwrap().render(&messages, None, false).unwrap()
    };
    assert_eq!(print("{{ messages[0].content }} {{ messages[0].n }} {{ messages[0].list }}"), "None 1.0 ['a', True, None]");
    assert_eq!(print("{{ '  a-b '.strip().split('-')[-1] }}{{ 'x'.startswith('x') }}{{ tools is none }}"), "bTrueTrue");
    assert_eq!(
        print("{%- for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"),
        "013"
    );
    assert_eq!(print("{% for k, v in messages[0].items() %}{{ k }},{% endfor %}"), "role,content,n,list,");
    assert_eq!(print("{{ {'b': '<é>', 'a': 1} | tojson }}"), "{\"b\": \"<é>\", \"a\": 1}");
    let year = print("{{ strftime_now('%Y') }}");
    assert!(year.len() == 4 && year.parse::<u32>().unwrap() >= 2024, "{year}");
}
