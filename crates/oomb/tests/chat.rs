//! Conversations against transformers: rendered text, tokens and masks (scripts/chat_golden.py), and what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::{LossOn, TokenizerSource};
use oomb::data::Tokenizer;
use oomb::data::chat::{ChatTemplate, encode, render};
use serde::Deserialize;
use serde_json::{Map, Value};
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
    let template = ChatTemplate::load(None, &tokenizer).unwrap();
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
