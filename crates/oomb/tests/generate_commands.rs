//! `generate` and `eval` by position and with tasks, as people run them, on a tiny model with random weights.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use std::path::Path;

fn oomb(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("oomb").unwrap().current_dir(folder).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn succeed(folder: &Path, args: &[&str]) -> (String, String) {
    let (code, stdout, stderr) = oomb(folder, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    (stdout, stderr)
}

/// A folder with a text and a run of one step on it.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = "[model]\npreset = \"tiny\"\n[data]\ntrain = \"text.txt\"\ntokenizer = \"bytes\"\nsequence_tokens = 200\n\
                  [schedule]\nchunk_tokens = 64\n[kv]\npage_tokens = 16\n[run]\nout = \"run\"\nsteps = 1\ndevice = \"cpu\"\n";
    std::fs::write(folder.path().join("run.toml"), config).unwrap();
    let novel = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap();
    std::fs::write(folder.path().join("text.txt"), &novel[..1200]).unwrap();
    succeed(folder.path(), &["train", "--config", "run.toml"]);
    folder
}

#[test]
fn from_a_run_to_text_and_scores() {
    let folder = workplace();
    let dir = folder.path();
    let cpu = ["--tokenizer", "bytes", "--set", "run.device=cpu"];
    let generate = |args: &[&str]| oomb(dir, &[&["generate"], &cpu[..], args].concat());

    let (code, greedy, note) = generate(&["--run", "run", "--prompt", "Emma ", "--max-tokens", "20"]);
    assert!(code == 0 && greedy.len() > 20 && note.contains("5 tokens of prompt"), "{greedy} {note}");
    let cut = ["--set", "kv.page_tokens=3", "--set", "schedule.chunk_tokens=3"];
    std::fs::write(dir.join("prompt.txt"), "Emma \n").unwrap();
    let (_, same, _) =
        generate(&[&["--model", "run/model", "--prompt-file", "prompt.txt", "--max-tokens", "20"], &cut[..]].concat());
    assert_eq!(greedy, same);
    let sampled =
        |seed: &str| generate(&["--run", "run", "--prompt", "E", "--temperature", "1", "--seed", seed, "--max-tokens", "30"]).1;
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));

    let (_, _, warning) = generate(&[
        "--run",
        "run",
        "--prompt",
        "E",
        "--max-tokens",
        "1",
        "--set",
        "model.rope_scaling={rope_type=\"linear\",factor=2.0}",
    ]);
    assert!(!warning.contains("error"), "{warning}");
    for (args, wanted) in [
        (&["--run", "run", "--prompt", ""][..], "the prompt has no tokens"),
        (&["--run", "nowhere", "--prompt", "x"], "there is no model in nowhere/model"),
        (&["--run", "run", "--prompt-file", "gone.txt"], "cannot read the prompt gone.txt"),
    ] {
        let (code, stdout, stderr) = generate(args);
        assert!(code == 1 && stdout.is_empty() && stderr.contains(wanted), "{stderr}");
    }
    // The model's folder says that it reads bytes; one that says nothing is not guessed at.
    let plain = ["generate", "--run", "run", "--prompt", "x", "--max-tokens", "3", "--set", "run.device=cpu"];
    let (code, _, stderr) = oomb(dir, &plain);
    assert_eq!(code, 0, "{stderr}");
    std::fs::rename(dir.join("run/model/tokenizer.json"), dir.join("aside.json")).unwrap();
    let (code, _, stderr) = oomb(dir, &plain);
    assert!(code == 1 && stderr.contains("has no tokenizer.json: give --tokenizer"), "{stderr}");
    std::fs::rename(dir.join("aside.json"), dir.join("run/model/tokenizer.json")).unwrap();

    let eval = ["eval", "--model", "run/model"];
    let data = ["--data", "text.txt", "--sequence-tokens", "200", "--json", "loss.json", "--svg", "loss.svg"];
    let (table, _) = succeed(dir, &[&eval[..], &data, &cpu].concat());
    assert!(table.contains("perplexity") && table.contains("64 – 127"), "{table}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("loss.json")).unwrap()).unwrap();
    let buckets = json["by_position"].as_array().unwrap();
    let sums = |key: fn(&serde_json::Value) -> f64| buckets.iter().map(key).sum::<f64>();
    let labels = sums(|bucket| bucket["labels"].as_f64().unwrap());
    let mean = sums(|bucket| bucket["labels"].as_f64().unwrap() * bucket["loss"].as_f64().unwrap()) / labels;
    assert_eq!(labels, json["labels"].as_f64().unwrap());
    assert!((mean - json["loss"].as_f64().unwrap()).abs() < 1e-9);
    assert!(std::fs::read_to_string(dir.join("loss.svg")).unwrap().contains("<polyline"));

    let tasks =
        ["--tasks", "needle,variables", "--lengths", "1K,768", "--samples", "1", "--depths", "0,100", "--haystack", "text.txt"];
    let (text, _) = succeed(dir, &[&eval[..], &tasks, &cpu, &["--json", "--svg", "tasks.svg"]].concat());
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 2 * (2 + 1));
    assert!(cells.iter().all(|cell| cell["accuracy"] == 0.0 && cell["samples"] == 1), "{cells:?}");
    assert!(std::fs::read_to_string(dir.join("tasks.svg")).unwrap().contains("needle, depth 100 %"));
    let (code, _, stderr) = oomb(dir, &[&eval[..], &["--tasks", "needle", "--lengths", "100"], &cpu].concat());
    assert!(code == 1 && stderr.contains("task needle does not fit 100 tokens"), "{stderr}");
}

/// With `--chat` the prompt is what the checkpoint's own template makes of a message.
#[test]
fn a_chat_is_rendered_by_the_checkpoints_template() {
    let folder = workplace();
    let dir = folder.path();
    let template =
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let vocab: serde_json::Map<String, serde_json::Value> =
        (32_u8..127).map(|byte| (char::from(byte).to_string(), serde_json::json!(byte))).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false}, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": " "}
    });
    std::fs::create_dir(dir.join("chat")).unwrap();
    std::fs::write(dir.join("chat/tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = serde_json::json!({ "chat_template": template });
    std::fs::write(dir.join("chat/tokenizer_config.json"), config.to_string()).unwrap();
    let generate = |args: &[&str]| {
        let common = ["generate", "--run", "run", "--tokenizer", "chat", "--max-tokens", "8", "--set", "run.device=cpu"];
        succeed(dir, &[&common[..], args].concat())
    };
    let (chat, note) = generate(&["--chat", "--system", "Be short.", "--prompt", "Who is Emma?"]);
    assert!(note.contains("46 tokens of prompt"), "{note}");
    let (plain, _) = generate(&["--prompt", "[system]Be short.[user]Who is Emma?[assistant]"]);
    assert_eq!(chat, plain);
    let (code, _, said) = oomb(dir, &["generate", "--run", "run", "--tokenizer", "bytes", "--chat", "--prompt", "x"]);
    assert!(code == 1 && said.contains("template"), "{said}");
}
