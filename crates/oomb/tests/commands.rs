//! `train`, `eval`, `export` and `plan` as people run them, on a model small enough for every test run.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use oomb::metrics::Record;
use std::fs;
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"
[model]
preset = "tiny"
[data]
train = "text.txt"
tokenizer = "bytes"
sequence_tokens = 100
[schedule]
chunk_tokens = 32
[kv]
page_tokens = 16
[optimizer]
lr = 3e-3
[run]
out = "runs/first"
steps = 4
device = "cpu"
"#;

/// A folder with a configuration and some text.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), CONFIG).unwrap();
    let novel = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap();
    fs::write(folder.path().join("text.txt"), &novel[..1050]).unwrap();
    folder
}

fn oomb(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("oomb").unwrap().current_dir(folder).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn succeed(folder: &Path, args: &[&str]) -> String {
    let (code, stdout, stderr) = oomb(folder, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    stdout
}

/// `oomb train --config run.toml` with overrides.
fn train<'a>(set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "--config", "run.toml"];
    args.extend(set.iter().flat_map(|set| ["--set", *set]));
    args
}

/// What a refused training says; nothing may be left behind.
fn refused(set: &[&str]) -> String {
    let folder = workplace();
    let (code, stdout, stderr) = oomb(folder.path(), &train(set));
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    assert!(!folder.path().join("runs/first").exists(), "a refused run leaves no folder");
    stderr
}

fn metrics(folder: &Path, run: &str) -> Vec<Record> {
    let text = fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Files below a folder with their contents, to see that nothing changed.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(contents(&path)) } else { found.push((path.clone(), fs::read(&path).unwrap())) }
    }
    found.sort();
    found
}

#[test]
fn a_run_from_text_to_an_exported_model() {
    let folder = workplace();
    let dir = folder.path();
    let set = ["data.validation=text.txt", "run.validate_every=3", "run.validation_sequences=100", "optimizer.schedule=constant"];
    let output = succeed(dir, &train(&set));
    assert!(output.contains("step 4/4") && output.contains("validation loss"), "{output}");
    assert!(!output.contains('\x1b') && !output.contains('\r'), "plain when piped: {output:?}");

    let records = metrics(dir, "runs/first");
    assert_eq!(records.iter().map(|record| record.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(records.iter().map(|record| record.validation_loss.is_some()).collect::<Vec<_>>(), [false, false, true, true]);
    assert!((records[0].loss - (256_f64).ln()).abs() < 0.2, "random weights guess: {}", records[0].loss);
    assert!(records[3].validation_loss < records[2].validation_loss, "it learns: {records:?}");
    assert!(records.iter().all(|record| record.device_bytes > 0 && record.grad_norm > 0.0 && record.tokens <= 100));

    // The saved model is the trained one: its loss is the last validation loss.
    let eval = ["eval", "--model", "runs/first/model", "--data", "text.txt", "--sequence-tokens", "100", "--json"];
    let eval = [&eval[..], &["--tokenizer", "bytes"]].concat();
    let report: serde_json::Value = serde_json::from_str(&succeed(dir, &eval)).unwrap();
    let (loss, last) = (report["loss"].as_f64().unwrap(), records[3].validation_loss.unwrap());
    assert!((loss - last).abs() < 1e-5, "eval {loss}, validation {last}");
    assert_eq!(
        (report["sequences"].as_u64(), report["tokens"].as_u64(), report["labels"].as_u64()),
        (Some(11), Some(1050), Some(1039))
    );
    assert!((report["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);

    succeed(dir, &["export", "--run", "runs/first", "--out", "exported"]);
    assert_eq!(
        fs::read(dir.join("exported/model.safetensors")).unwrap(),
        fs::read(dir.join("runs/first/model/model.safetensors")).unwrap()
    );
    succeed(dir, &["export", "--run", "runs/first", "--out", "small", "--dtype", "bf16", "--max-shard-bytes", "100KB"]);
    assert!(dir.join("small/model.safetensors.index.json").exists());

    // Neither training nor exporting again touches what is there.
    let before = contents(dir);
    let (code, _, stderr) = oomb(dir, &train(&set));
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr, @"error: runs/first holds a run: go on with it by --resume, or set run.out to a new folder; nothing was written");
    let (code, _, stderr) = oomb(dir, &["export", "--run", "runs/first", "--out", "exported"]);
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr, @"error: exported exists and is not empty: choose another folder, or remove it; nothing was written");
    assert_eq!(contents(dir), before);
}

#[test]
fn same_seed_same_losses_whatever_the_threads_and_the_page_budget() {
    let folder = workplace();
    let dir = folder.path();
    let losses = |name: &str, set: &[&str]| {
        let out = format!("run.out=runs/{name}");
        succeed(dir, &train(&[&[out.as_str()], set].concat()));
        metrics(dir, &format!("runs/{name}")).iter().map(|record| record.loss).collect::<Vec<_>>()
    };
    let first = losses("a", &[]);
    assert_eq!(losses("b", &["run.threads=1"]), first);
    assert_ne!(losses("c", &["run.seed=1"]), first);
    let groups = ["kv.group_pages=1", "kv.prefetch_groups=1"];
    let too_small = refused(&[&["kv.device_budget=1KiB"], &groups[..]].concat());
    let wanted = too_small.split("kv.device_budget = \"").nth(1).and_then(|text| text.split('"').next()).expect("a budget");
    let small = losses("d", &[&[format!("kv.device_budget={wanted}").as_str()], &groups[..]].concat());
    assert!(small.iter().zip(&first).all(|(small, whole)| (small - whole).abs() < 1e-4), "{small:?} {first:?}");
    assert!(metrics(dir, "runs/d")[0].host_bytes > 0, "pages went to the host");
}

#[test]
fn the_resolved_configuration_repeats_the_run() {
    let folder = workplace();
    let dir = folder.path();
    succeed(dir, &train(&["optimizer.warmup_steps=2"]));
    succeed(dir, &["train", "--config", "runs/first/config.toml", "--set", "run.out=runs/second"]);
    let losses = |run| metrics(dir, run).iter().map(|record| (record.loss, record.lr)).collect::<Vec<_>>();
    assert_eq!(losses("runs/first"), losses("runs/second"));
}

#[test]
fn prepared_data_and_text_train_alike() {
    let folder = workplace();
    let dir = folder.path();
    succeed(dir, &["prepare", "text.txt", "--out", "tokens", "--tokenizer", "bytes"]);
    succeed(dir, &train(&[]));
    succeed(dir, &train(&["data.train=tokens", "run.out=runs/second"]));
    let losses = |run| metrics(dir, run).iter().map(|record| record.loss).collect::<Vec<_>>();
    assert_eq!(losses("runs/first"), losses("runs/second"));
}

#[test]
fn refused_before_any_work() {
    insta::assert_snapshot!(refused(&["run.step=3"]), @"error: --set run.step: unknown key `run.step`; did you mean `steps`?");
    insta::assert_snapshot!(refused(&["model.preset=tinny"]), @r#"error: there is no built-in model "tinny"; did you mean "tiny"?"#);
    insta::assert_snapshot!(refused(&["data.sequence_tokens=1M"]), @"error: data.sequence_tokens = 1048576 is longer than the data: runs/prepared/text-905065c0 has 1050 tokens; shorten the sequence, or add text");
    insta::assert_snapshot!(refused(&["data.train=none.txt"]), @"error: cannot read none.txt: No such file or directory (os error 2)");
    insta::assert_snapshot!(refused(&["data.tokenizer=none.json"]), @r#"error: tokenizer none.json: cannot read it: No such file or directory (os error 2); give "bytes", a tokenizer.json, or a folder that has one"#);
    let no_such_gpu = refused(&["run.device=cuda:999"]);
    assert!(no_such_gpu.starts_with("error: device cuda:999 is not available: "), "{no_such_gpu}");
    insta::assert_snapshot!(refused(&["model.rope_scaling={ rope_type = \"spiral\", factor = 2.0 }"]), @r#"error: model.rope_scaling.rope_type = "spiral" is not supported: supported are default, linear, dynamic, llama3, yarn"#);
}

#[test]
fn training_that_explodes_names_the_step() {
    let folder = workplace();
    let (code, _, stderr) = oomb(folder.path(), &train(&["optimizer.lr=1e30", "optimizer.clip_norm=off"]));
    assert_eq!(code, 1);
    insta::assert_snapshot!(stderr, @"
    error: step 2: the gradient norm is NaN, backwards first in the gradient of model.norm.weight; training stopped
    there is no checkpoint yet: lower optimizer.lr, set optimizer.clip_norm, or look at this step's data
    ");
    assert_eq!(metrics(folder.path(), "runs/first").len(), 1);
    let (_, _, stderr) = oomb(folder.path(), &["export", "--run", "runs/first", "--out", "exported"]);
    insta::assert_snapshot!(stderr, @"error: runs/first holds neither a finished model nor a checkpoint");
}

/// `oomb plan --model qwen2.5-7b` for a GPU.
fn plan<'a>(tokens: &'a str, device: &'a str, host: &'a str, more: &[&'a str]) -> (i32, String, String) {
    let args = ["plan", "--model", "qwen2.5-7b", "--sequence-tokens", tokens, "--device-memory", device, "--host-memory", host];
    let folder = tempfile::tempdir().unwrap();
    oomb(folder.path(), &[&args[..], more].concat())
}

#[test]
fn a_million_tokens_fit_one_gpu_and_not_a_small_one() {
    let (code, stdout, stderr) = plan("1M", "139GiB", "125GiB", &["--optimizer", "none"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("kv.pages.host") && stdout.ends_with("it fits\n"), "{stdout}");
    let exact = ["--set", "optimizer.state_dtype=f32", "--set", "optimizer.placement=device"];
    let (code, stdout, stderr) = plan("1M", "139GiB", "125GiB", &exact);
    assert_eq!(code, 1);
    assert!(stdout.contains("adamw.m"), "the plan that does not fit is shown: {stdout}");
    insta::assert_snapshot!(stderr, @r#"
    error: this run does not fit a GPU: it needs 138.99 GiB of device memory (139.00 GiB available) and 133.55 GiB of pinned host memory (125.00 GiB available)
    largest: kv.gradients.host 89.03 GiB, kv.pages.host 44.52 GiB, gradients 28.37 GiB, adamw.m 28.37 GiB
    it fits with optimizer.state_dtype, master_weights and placement = "auto", or with kv.grad_dtype = "bf16", or with data.sequence_tokens = 524288
    "#);
    let (code, stdout, _) = plan("1M", "139GiB", "125GiB", &[]);
    assert!(
        code == 0 && stdout.contains("\noptimizer int8 states, f32 masters, on the device (more does not fit)\n"),
        "{stdout}"
    );
    let (code, ..) = plan("1M", "139GiB", "125GiB", &["--set", "kv.grad_dtype=bf16"]);
    assert_eq!(code, 0, "what the message advises is true");
}

#[test]
fn plans_are_asked_for_correctly() {
    let folder = workplace();
    let code = |args: &[&str]| oomb(folder.path(), args).0;
    assert_eq!(code(&["plan"]), 2);
    assert_eq!(code(&["plan", "--model", "tiny"]), 2);
    assert_eq!(code(&["plan", "--config", "run.toml", "--sequence-tokens", "1K"]), 2);
    assert_eq!(code(&["plan", "--config", "run.toml", "--device-memory", "1GiB"]), 2);
    assert_eq!(code(&["plan", "--config", "run.toml", "--device-memory", "much", "--host-memory", "1GiB"]), 2);
    let stdout = succeed(folder.path(), &["plan", "--config", "run.toml"]);
    assert!(stdout.contains("weights") && stdout.ends_with("it fits\n"), "{stdout}");
}
