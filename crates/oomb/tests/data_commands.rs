//! `prepare` and `train` on rows and conversations as people run them.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use oomb::metrics::Record;
use std::fs;
use std::path::Path;

const TALKS: &str = r#"{"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two. 🦀"}]}
{"messages": []}
{"messages": [{"role": "user", "content": "Three?"}, {"role": "assistant", "content": "Four, and a long story about five."}]}
"#;

const CONFIG: &str = r#"
[model]
preset = "tiny"
[data]
sequence_tokens = 32
tokenizer = "bytes"
chat_template = "chat.jinja"
[[data.sources]]
paths = "text.txt"
weight = 2
[[data.sources]]
paths = "talks.jsonl"
format = "chat"
[schedule]
chunk_tokens = 16
[kv]
page_tokens = 16
[run]
out = "runs/first"
steps = 9
device = "cpu"
"#;

fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| fs::write(folder.path().join(name), content).unwrap();
    write("run.toml", CONFIG);
    write("talks.jsonl", TALKS);
    write(
        "chat.jinja",
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    );
    let novel = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap();
    write("text.txt", &novel[..400]);
    folder
}

fn oomb(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("oomb").unwrap().current_dir(folder).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn losses(folder: &Path, run: &str) -> Vec<f64> {
    let text = fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str::<Record>(line).unwrap().loss).collect()
}

#[test]
fn a_preview_marks_what_is_trained() {
    let folder = workplace();
    let args = ["prepare", "talks.jsonl", "--format", "chat", "--chat-template", "chat.jinja", "--tokenizer", "bytes"];
    let (code, stdout, stderr) = oomb(folder.path(), &[&args[..], &["--preview"]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout, @"
    talks.jsonl row 1: 21 tokens, 10 of them trained, between ⟦ and ⟧
    <u>One?
    <a>⟦Two. 🦀
    ⟧
    ");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "nothing is written");
    assert_eq!(oomb(folder.path(), &args).0, 2, "without --out");
    let (code, stdout, stderr) = oomb(folder.path(), &[&args[..], &["--out", "talks"]].concat());
    assert_eq!(code, 0, "{stderr}");
    insta::assert_snapshot!(stdout, @"talks: 69 tokens (45 trained) in 2 documents of 1 file, vocabulary 256, 1 shard; left out: 1 with nothing to train, 0 malformed");
    insta::assert_snapshot!(stderr, @"left out: talks.jsonl row 2: nothing in it is trained");
    let again = oomb(folder.path(), &[&args[..], &["--out", "talks"]].concat());
    assert!(again.1.contains("(made before from the same text)"), "{}", again.1);
    let (code, _, stderr) =
        oomb(folder.path(), &["prepare", "text.txt", "--loss-on", "all", "--tokenizer", "bytes", "--out", "x"]);
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr, @"error: --chat-template and --loss-on are for conversations: add --format chat, or leave them out");
}

#[test]
fn sources_of_two_kinds_train_together() {
    let folder = workplace();
    let (code, stdout, stderr) = oomb(folder.path(), &["train", "--config", "run.toml"]);
    assert_eq!(code, 0, "{stderr}");
    let report: Vec<&str> = stdout.lines().take_while(|line| !line.contains("parameters")).collect();
    let report = report.join("\n");
    let checksum = report.split("talks-").nth(1).and_then(|text| text.split('/').next()).expect("the folder of the talks");
    insta::assert_snapshot!(report.replace(checksum, "CHECKSUM"), @"
    training data: 400 tokens, 1 of 1 document(s), in 13 sequence(s)
    training data: 53 tokens, 2 of 2 document(s), in 2 sequence(s)
      1 cut short to a sequence: talks.jsonl row 3
      1 row(s) left out when it was prepared: runs/prepared/talks-CHECKSUM/left_out.jsonl
    ");
    let resolved = oomb(folder.path(), &["train", "--config", "runs/first/config.toml", "--set", "run.out=runs/second"]);
    assert_eq!(resolved.0, 0, "{}", resolved.2);
    assert_eq!(losses(folder.path(), "runs/first"), losses(folder.path(), "runs/second"));
    let prepared = format!("data.sources=[{{ paths = \"runs/prepared/talks-{checksum}\" }}]");
    let train = |set: &str| {
        let sets = ["run.out=runs/third", "run.steps=1", "data.format=chat", &prepared, set];
        let args = sets.iter().flat_map(|set| ["--set", set]);
        oomb(folder.path(), &["train", "--config", "run.toml"].into_iter().chain(args).collect::<Vec<_>>())
    };
    let (code, _, stderr) = train("data.loss_on=all");
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr.replace(checksum, "CHECKSUM"), @r#"error: runs/prepared/talks-CHECKSUM was prepared with loss_on = "assistant", but data.loss_on is "all"; remove the setting, or prepare the data again"#);
    let (code, _, stderr) = train("data.loss_on=assistant");
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) =
        oomb(folder.path(), &["train", "--config", "run.toml", "--set", "run.out=x", "--set", "data.sequence_tokens=8"]);
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr.replace(checksum, "CHECKSUM"), @"error: every document of prepared/talks-CHECKSUM has no tokens to train within data.sequence_tokens: lengthen the sequence");
}
