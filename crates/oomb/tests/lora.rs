//! Adapters as people train them: from a checkpoint to an adapter, its evaluation, its merge, and training that goes on.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use oomb::metrics::Record;
use safetensors::{Dtype, SafeTensors};
use std::fs;
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"
[model]
MODEL
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
schedule = "constant"
[run]
out = "runs/OUT"
steps = 3
device = "cpu"
"#;

/// A folder with text, a base model of random weights in runs/base/model, and a configuration tuned.toml that starts from it.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let novel = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap();
    fs::write(dir.join("text.txt"), &novel[..1050]).unwrap();
    let config = |model: &str, out: &str| CONFIG.replace("MODEL", model).replace("OUT", out);
    fs::write(dir.join("base.toml"), config("preset = \"tiny\"", "base")).unwrap();
    fs::write(dir.join("tuned.toml"), config("path = \"runs/base/model\"", "tuned")).unwrap();
    succeed(dir, &["train", "--config", "base.toml", "--set", "run.steps=1"]);
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

fn fail(folder: &Path, args: &[&str]) -> String {
    let (code, stdout, stderr) = oomb(folder, args);
    assert_eq!((code, stdout.as_str()), (1, ""), "{args:?}: {stderr}");
    stderr
}

/// `oomb train --config tuned.toml` with overrides.
fn train<'a>(set: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["train", "--config", "tuned.toml"];
    args.extend(set.iter().flat_map(|set| ["--set", *set]));
    args
}

fn metrics(folder: &Path, run: &str) -> Vec<Record> {
    let text = fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn eval(folder: &Path, model: &str, more: &[&str]) -> f64 {
    let args = ["eval", "--data", "text.txt", "--sequence-tokens", "100", "--tokenizer", "bytes", "--json", "--model", model];
    let report: serde_json::Value = serde_json::from_str(&succeed(folder, &[&args[..], more].concat())).unwrap();
    report["loss"].as_f64().unwrap()
}

/// Files below a folder with their contents.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(contents(&path)) } else { found.push((path.clone(), fs::read(&path).unwrap())) }
    }
    found.sort();
    found
}

const VALIDATION: [&str; 3] = ["data.validation=text.txt", "run.validate_every=1", "run.validation_sequences=100"];

#[test]
fn an_adapter_from_training_to_a_merged_model() {
    let folder = workplace();
    let dir = folder.path();
    let base = contents(&dir.join("runs/base"));
    let set = [&VALIDATION[..], &["lora.rank=4", "lora.target_modules=[\"v_proj\", \"q_proj\", \"down_proj\"]"]].concat();
    let output = succeed(dir, &train(&set));
    assert!(output.contains(", an adapter of ") && output.ends_with("adapter in runs/tuned/adapter\n"), "{output}");
    assert!(!dir.join("runs/tuned/model").exists());
    let records = metrics(dir, "runs/tuned");
    let validation = records[2].validation_loss.unwrap();
    assert!(validation < records[0].validation_loss.unwrap(), "it learns: {records:?}");

    // As PEFT saves an adapter, to an independent reader: tiny has D 64, F 192, H·Dh 64, G·Dh 32.
    let bytes = fs::read(dir.join("runs/tuned/adapter/adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names: Vec<_> = file.names().into_iter().map(str::to_owned).collect();
    names.sort();
    let mut wanted = Vec::new();
    for layer in 0..2 {
        for (module, outputs, inputs) in [("self_attn.q_proj", 64, 64), ("self_attn.v_proj", 32, 64), ("mlp.down_proj", 64, 192)]
        {
            for (factor, shape) in [("lora_A", [4, inputs]), ("lora_B", [outputs, 4])] {
                let name = format!("base_model.model.model.layers.{layer}.{module}.{factor}.weight");
                let tensor = file.tensor(&name).unwrap();
                assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &shape[..]), "{name}");
                wanted.push(name);
            }
        }
    }
    wanted.sort();
    assert_eq!(names, wanted);
    let config = fs::read(dir.join("runs/tuned/adapter/adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["peft_type"], &config["r"], &config["lora_alpha"]), (&"LORA".into(), &4.into(), &8.into()));
    assert_eq!(config["target_modules"], serde_json::json!(["q_proj", "v_proj", "down_proj"]));
    assert_eq!(config["base_model_name_or_path"], "runs/base/model");

    // Beside the base in training and in an evaluation, and merged into a folder: one loss.
    let beside = eval(dir, "runs/base/model", &["--adapter", "runs/tuned/adapter"]);
    assert!((beside - validation).abs() < 1e-6, "{beside} {validation}");
    assert!((eval(dir, "runs/base/model", &[]) - beside).abs() > 1e-3);
    succeed(dir, &["export", "--run", "runs/tuned", "--merge", "--out", "merged"]);
    let merged = eval(dir, "merged", &[]);
    assert!((merged - beside).abs() < 1e-5, "{merged} {beside}");
    let by_hand = ["export", "--model", "runs/base/model", "--adapter", "runs/tuned/adapter", "--out", "again"];
    succeed(dir, &by_hand);
    let bytes = |folder: &str| contents(&dir.join(folder)).into_iter().map(|(_, bytes)| bytes).collect::<Vec<_>>();
    assert_eq!(bytes("again"), bytes("merged"));

    // Training goes on where it stopped: an idle step leaves the loss as it was.
    let more = ["run.out=runs/more", "lora.path=runs/tuned/adapter", "run.steps=1", "optimizer.lr=1e-12"];
    succeed(dir, &train(&[&VALIDATION[..], &more].concat()));
    let idle = metrics(dir, "runs/more")[0].validation_loss.unwrap();
    assert!((idle - validation).abs() < 1e-6, "{idle} {validation}");
    assert_eq!(contents(&dir.join("runs/base")), base, "the base is only read");
}

#[test]
fn the_resolved_configuration_repeats_the_run() {
    let folder = workplace();
    let dir = folder.path();
    succeed(dir, &train(&["lora.rank=2", "lora.rslora=true", "lora.dropout=0"]));
    succeed(dir, &["train", "--config", "runs/tuned/config.toml", "--set", "run.out=runs/second"]);
    let adapter = |run: &str| fs::read(dir.join(run).join("adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(adapter("runs/tuned"), adapter("runs/second"));
    succeed(dir, &train(&["lora.rank=2", "lora.rslora=true", "run.seed=1", "run.out=runs/third"]));
    assert_ne!(adapter("runs/tuned"), adapter("runs/third"));
}

/// A run that goes on after a checkpoint ends with the bits of one that was never interrupted; its checkpoints hold the adapter
/// and its moments, and nothing of the base.
#[test]
fn an_adapter_resumes_exactly() {
    let folder = workplace();
    let dir = folder.path();
    for (dtype, state) in [("f32", "f32"), ("bf16", "f32"), ("bf16", "int8")] {
        let run = |out: &str, steps: &str, more: &[&str]| {
            let (out, steps, compute) =
                (format!("run.out=runs/{out}"), format!("run.steps={steps}"), format!("run.compute_dtype={dtype}"));
            let state = format!("optimizer.state_dtype={state}");
            let own = ["lora.rank=2", "run.keep_checkpoints=9", out.as_str(), steps.as_str(), compute.as_str(), state.as_str()];
            let set = [&own[..], &VALIDATION[..]].concat();
            succeed(dir, &[&train(&set)[..], more].concat())
        };
        let (whole, parts) = (format!("whole-{dtype}-{state}"), format!("parts-{dtype}-{state}"));
        run(&whole, "4", &[]);
        run(&parts, "2", &[]);
        let output = run(&parts, "4", &["--resume"]);
        assert!(output.contains("going on after step 2"), "{output}");
        let output = run(&parts, "4", &["--resume"]);
        assert!(output.contains("the run is finished: adapter in "), "{output}");
        let adapter = |run: &str| fs::read(dir.join("runs").join(run).join("adapter/adapter_model.safetensors")).unwrap();
        assert_eq!(adapter(&whole), adapter(&parts), "{dtype}");
        let losses = |run: &str| metrics(dir, &format!("runs/{run}")).iter().map(|record| record.loss).collect::<Vec<_>>();
        assert_eq!(losses(&whole), losses(&parts), "{dtype}");
        let checkpoint = dir.join("runs").join(&parts).join("checkpoints/step-2");
        assert!(checkpoint.join("adapter").is_dir() && !checkpoint.join("model").exists());
        let bytes: usize = contents(&checkpoint).iter().map(|(_, bytes)| bytes.len()).sum();
        let base: usize = contents(&dir.join("runs/base/model")).iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(bytes < base / 4, "{bytes} {base}");
        let (run, out) = (format!("runs/{parts}"), format!("step-2-{dtype}-{state}"));
        succeed(dir, &["export", "--run", &run, "--checkpoint", "step-2", "--merge", "--out", &out]);
        let validation = metrics(dir, &run)[1].validation_loss.unwrap();
        // In bf16 the merge, or what it is compared with, is rounded.
        let bound = if dtype == "f32" { 1e-5 } else { 1e-2 };
        assert!((eval(dir, &out, &[]) - validation).abs() < bound, "{dtype}");
    }
}

#[test]
fn mistakes_are_named() {
    let folder = workplace();
    let dir = folder.path();
    let refused = |set: &[&str]| fail(dir, &train(set));
    let mut all = vec![
        refused(&["lora.rank=0"]),
        refused(&["lora.alpha=-1"]),
        refused(&["lora.dropout=0.1"]),
        refused(&["lora.target_modules=[\"q_prj\"]"]),
        refused(&["lora.target_modules=lm_head"]),
        refused(&["lora.target_modules=[]"]),
        refused(&["lora.target_modules=3"]),
        refused(&["lora.r=8"]),
        refused(&["lora.path=runs/none"]),
        refused(&["lora.path=runs/none", "lora.rank=8"]),
        fail(dir, &["train", "--config", "base.toml", "--set", "run.out=runs/x", "--set", "lora.rank=8"]),
    ];
    assert!(!dir.join("runs/tuned").exists() && !dir.join("runs/x").exists());
    succeed(dir, &train(&["lora.rank=2", "run.steps=1"]));
    let config = dir.join("runs/tuned/adapter/adapter_config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.05")).unwrap();
    let go_on = ["lora.path=runs/tuned/adapter", "run.out=runs/more", "run.steps=1"];
    all.push(refused(&go_on));
    succeed(dir, &train(&[&go_on[..], &["lora.dropout=0"]].concat()));
    all.extend([
        fail(dir, &["export", "--run", "runs/tuned", "--out", "x"]),
        fail(dir, &["export", "--run", "runs/base", "--merge", "--out", "x"]),
    ]);
    insta::assert_snapshot!(all.join(""));
    for usage in
        [&["--out", "x"][..], &["--model", "runs/base/model", "--out", "x"], &["--run", "a", "--model", "b", "--adapter", "c"]]
    {
        assert_eq!(oomb(dir, &[&["export"], usage].concat()).0, 2, "{usage:?}");
    }
}

#[test]
fn a_plan_has_no_gradients_for_the_base() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |more: &[&str]| {
        let gpu = ["--device-memory", "79GiB", "--host-memory", "125GiB"];
        let args = ["plan", "--model", "qwen2.5-7b", "--sequence-tokens", "64K"];
        oomb(folder.path(), &[&args[..], &gpu, more].concat())
    };
    let exact = ["--set", "optimizer.state_dtype=f32", "--set", "optimizer.placement=device"];
    assert_eq!(
        plan(&[&exact[..], &["--set", "optimizer.master_weights=true"]].concat()).0,
        1,
        "training all weights takes 16 bytes for each of them"
    );
    let (code, text, stderr) = plan(&["--set", "lora.rank=16"]);
    assert_eq!(code, 0, "{stderr}");
    let lines: Vec<_> = text
        .lines()
        .filter(|line| ["weights ", "adapter ", "grad", "adamw", "trained"].iter().any(|start| line.starts_with(start)))
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}
