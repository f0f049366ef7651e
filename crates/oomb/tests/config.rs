//! The configuration file: defaults, every message a user can get, and that no text makes the parser panic.

use oomb::config::{Config, DeviceChoice, Keep, ModelSource, Selection, TokenizerSource};
use proptest::prelude::*;

const MINIMAL: &str = r#"
[model]
preset = "tiny"
[data]
train = "data/emma"
sequence_tokens = 32768
[run]
out = "runs/emma"
steps = 20
"#;

fn parse(overrides: &[&str]) -> Result<Config, String> {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    Config::parse(MINIMAL, "emma.toml", &overrides).map_err(|e| e.to_string())
}

fn refuse(text: &str) -> String {
    Config::parse(text, "emma.toml", &[]).expect_err("this configuration is wrong").to_string()
}

fn refuse_set(setting: &str) -> String {
    parse(&[setting]).expect_err("this override is wrong")
}

/// `MINIMAL` with a line added to a section.
fn with(section: &str, line: &str) -> String {
    let header = format!("[{section}]\n");
    if MINIMAL.contains(&header) {
        MINIMAL.replace(&header, &format!("{header}{line}\n"))
    } else {
        format!("{MINIMAL}{header}{line}\n")
    }
}

#[test]
fn the_issue_s_example_reads_as_written() {
    let text = r#"
        [model]
        preset = "tiny"
        [data]
        train = "data/emma"
        sequence_tokens = 32768
        [schedule]
        chunk_tokens = 2048
        keep = "auto"
        keep_budget = "auto"
        [kv]
        page_tokens = 128
        selection = "all"
        grad_dtype = "f32"
        device_budget = "auto"
        [optimizer]
        name = "adamw"
        lr = 3e-4
        [run]
        out = "runs/emma"
        steps = 20
        seed = 0
        device = "auto"
    "#;
    let config = Config::parse(text, "emma.toml", &[]).unwrap();
    assert_eq!(config.model.source, ModelSource::Preset("tiny".into()));
    assert_eq!((config.data.sequence_tokens, config.schedule.chunk_tokens, config.kv.page_tokens), (32768, Some(2048), 128));
    assert_eq!((config.schedule.keep, config.kv.selection, config.run.device), (Keep::Auto, Selection::All, DeviceChoice::Auto));
    assert_eq!((config.kv.device_budget_bytes, config.optimizer.lr), (None, 3e-4));
}

#[test]
fn overrides_are_typed_as_the_file_is() {
    let config = parse(&[
        "data.sequence_tokens=1M",
        "kv.device_budget=64MiB",
        "kv.selection=window:4K",
        "run.out=runs/other",
        "run.device=cuda:1",
        "optimizer.lr=1e-3",
        "optimizer.clip_norm=off",
        "data.train=[\"a.txt\", \"b.txt\"]",
        "data.tokenizer=bytes",
        "model.rope_scaling.rope_type=yarn",
        "model.rope_scaling.factor=4.0",
    ])
    .unwrap();
    assert_eq!(config.data.sequence_tokens, 1_048_576);
    assert_eq!(config.kv.device_budget_bytes, Some(64 << 20));
    assert_eq!(config.kv.selection, Selection::Window(4096));
    assert_eq!(config.run.out.to_str(), Some("runs/other"));
    assert_eq!(config.run.device, DeviceChoice::Cuda(1));
    assert_eq!((config.optimizer.lr, config.optimizer.clip_norm), (1e-3, None));
    assert_eq!((config.data.train.len(), config.data.tokenizer), (2, Some(TokenizerSource::Bytes)));
    assert_eq!(config.model.rope_scaling.unwrap()["factor"], 4.0);
}

#[test]
fn the_resolved_file_reads_back_to_the_same() {
    let settings: [&[&str]; 5] = [
        &[],
        &["optimizer.schedule=constant", "optimizer.clip_norm=off", "kv.device_budget=64MiB", "schedule.loss_tile_tokens=512"],
        &[
            "data.validation=[\"v 1.txt\", 'a\"b.txt']",
            "run.validate_every=7",
            "run.validation_sequences=3",
            "data.tokenizer=x.json",
            "model.rope_scaling={ rope_type = \"yarn\", factor = 4.0 }",
            "run.threads=2",
            "kv.group_pages=3",
        ],
        &["lora.rank=3", "lora.alpha=4.5", "lora.rslora=true", "lora.target_modules=[\"up_proj\", \"k_proj\", \"up_proj\"]"],
        &["lora.path=runs/a/adapter", "lora.dropout=0"],
    ];
    for overrides in settings {
        let config = parse(overrides).unwrap();
        assert_eq!(Config::parse(&config.to_toml(), "resolved", &[]).unwrap(), config, "{}", config.to_toml());
    }
}

#[test]
fn misspelt_key() {
    insta::assert_snapshot!(refuse(&with("schedule", "chunk_token = 2048")), @"emma.toml: unknown key `schedule.chunk_token`; did you mean `chunk_tokens`?");
}

#[test]
fn key_of_another_section() {
    insta::assert_snapshot!(refuse(&with("model", "lr = 1e-3")), @"emma.toml: unknown key `model.lr`; `lr` belongs in [optimizer]");
    insta::assert_snapshot!(refuse(&with("optimizer", "page_token = 1")), @"emma.toml: unknown key `optimizer.page_token`; did you mean `page_tokens` of [kv]?");
}

#[test]
fn unknown_key_near_nothing() {
    insta::assert_snapshot!(refuse(&with("schedule", "zzz = 1")), @"emma.toml: unknown key `schedule.zzz`; [schedule] has chunk_tokens, keep, keep_budget, keep_host_budget, loss_tile_tokens");
}

#[test]
fn unknown_section() {
    insta::assert_snapshot!(refuse(&with("schedul", "keep = 1")), @"emma.toml: unknown section [schedul]; did you mean [schedule]?");
    insta::assert_snapshot!(refuse(&format!("lr = 1e-3\n{MINIMAL}")), @"emma.toml: unknown key `lr` outside any section; `lr` belongs in [optimizer]");
    insta::assert_snapshot!(refuse(&format!("model = 3\n{}", &MINIMAL[25..])), @"emma.toml: model must be a section: write [model] and its keys below it, got the integer 3");
}

#[test]
fn wrong_type() {
    insta::assert_snapshot!(refuse_set("data.sequence_tokens=true"), @r#"--set data.sequence_tokens: data.sequence_tokens must be a number of tokens (32768, "64K", "1M"), got the boolean true"#);
    insta::assert_snapshot!(refuse(&with("kv", "device_budget = \"64 parsecs\"")), @r#"emma.toml: kv.device_budget must be "auto" or a number of bytes ("64MiB", "20GiB"), got the string "64 parsecs""#);
    insta::assert_snapshot!(refuse(&with("optimizer", "lr = \"high\"")), @r#"emma.toml: optimizer.lr must be a number, got the string "high""#);
    insta::assert_snapshot!(refuse(&with("run", "seed = -1")), @"emma.toml: run.seed must be a whole number, 0 or more, got the integer -1");
    insta::assert_snapshot!(refuse_set("schedule.keep=most"), @r#"--set schedule.keep: schedule.keep must be "auto", "inputs", "attention", "mlp" or "all", got the string "most""#);
}

#[test]
fn top_k_is_known_and_not_available() {
    insta::assert_snapshot!(refuse_set("kv.selection=top_k:64"), @r#"--set kv.selection: kv.selection = "top_k:64" is not available yet: use "all" or "window:4096""#);
}

#[test]
fn missing_settings() {
    insta::assert_snapshot!(refuse(&MINIMAL.replace("steps = 20", "")), @"emma.toml: run.steps is missing: for example steps = 100");
    insta::assert_snapshot!(refuse(&MINIMAL.replace("preset = \"tiny\"", "")), @r#"emma.toml: model needs either preset = "tiny" or path = "folder of a checkpoint""#);
    insta::assert_snapshot!(refuse(&with("model", "path = \"x\"")), @"emma.toml: model has both preset and path: remove one");
}

#[test]
fn settings_at_odds() {
    insta::assert_snapshot!(refuse_set("schedule.chunk_tokens=1000"), @"--set schedule.chunk_tokens: schedule.chunk_tokens must be a multiple of kv.page_tokens = 128, got 1000: take 896");
    insta::assert_snapshot!(refuse_set("kv.selection=window:0"), @r#"--set kv.selection: kv.selection must be a window of at least 1 token, got "window:0""#);
    insta::assert_snapshot!(refuse_set("optimizer.warmup_steps=21"), @"--set optimizer.warmup_steps: optimizer.warmup_steps = 21 is more than run.steps = 20: shorten the warm-up");
    insta::assert_snapshot!(refuse_set("optimizer.min_lr=1.0"), @"--set optimizer.min_lr: optimizer.min_lr must be 0 to optimizer.lr, got 1");
    insta::assert_snapshot!(refuse_set("run.validate_every=5"), @"--set run.validate_every: run.validate_every is set, but there is no validation data: set data.validation or remove it");
    insta::assert_snapshot!(refuse(&with("optimizer", "schedule = \"constant\"\nmin_lr = 1e-5")), @r#"emma.toml: optimizer.min_lr has no effect with schedule = "constant": remove one"#);
    insta::assert_snapshot!(refuse(&with("run", "device = \"cuda:0\"\ncompute_dtype = \"f32\"")), @r#"emma.toml: run.compute_dtype = "f32" is for the CPU, but run.device is "cuda:0": a GPU stores bf16"#);
    insta::assert_snapshot!(refuse_set("data.sequence_tokens=1"), @"--set data.sequence_tokens: data.sequence_tokens must be 2 to 4294967294 tokens, got 1");
    insta::assert_snapshot!(refuse_set("optimizer.betas=[0.9, 1.0]"), @"--set optimizer.betas: optimizer.betas must each be at least 0 and below 1, got 1");
    insta::assert_snapshot!(refuse_set("run.log_every=0"), @"--set run.log_every: run.log_every must be at least 1, got 0");
}

#[test]
fn sources_and_rows() {
    let text = MINIMAL.replace("train = \"data/emma\"\n", "packing = \"documents\"\n")
        + "[[data.sources]]\npaths = [\"a.jsonl\", \"b/*.parquet\"]\nweight = 3\n[[data.sources]]\npaths = \"talks\"\nformat = \"chat\"\n";
    let config = Config::parse(&text, "emma.toml", &["data.loss_on=all".to_owned()]).unwrap();
    assert_eq!(config.data.sources.iter().map(|source| source.weight).collect::<Vec<_>>(), [3.0, 1.0]);
    assert_eq!(Config::parse(&config.to_toml(), "resolved", &[]).unwrap(), config);
    let set = |set: &str| Config::parse(&text, "emma.toml", &[set.to_owned()]).unwrap_err().to_string();
    insta::assert_snapshot!(set("data.train=x"), @"emma.toml: data has both train and sources: make train one of [[data.sources]]");
    insta::assert_snapshot!(set("data.sources=[{ path = \"a\" }]"), @"--set data.sources: data.sources has an unknown key `path`; did you mean `paths`?");
    insta::assert_snapshot!(set("data.sources=[{ paths = \"a\", weight = 0 }]"), @"--set data.sources: data.sources has weight = 0, which must be above 0");
    insta::assert_snapshot!(set("data.sources=[{ paths = \"a\", format = \"csv\" }]"), @r#"--set data.sources: data.sources has format = "csv", which must be "text" or "chat""#);
    insta::assert_snapshot!(set("data.sources=a.txt"), @r#"--set data.sources: data.sources must be sections: write [[data.sources]] and paths = "…", weight = 1.0 below it, got the string "a.txt""#);
    insta::assert_snapshot!(set("data.packing=best"), @r#"--set data.packing: data.packing must be "auto", "concat", "documents" or "none", got the string "best""#);
    insta::assert_snapshot!(refuse_set("data.loss_on=all"), @r#"--set data.loss_on: data.loss_on is for conversations: set data.format = "chat", or remove it"#);
    insta::assert_snapshot!(refuse(&with("data", "packing = \"concat\"\nlong_documents = \"skip\"")), @r#"emma.toml: data.long_documents has no effect with packing = "concat", which cuts every document: remove one"#);
}

#[test]
fn overrides_that_are_none() {
    insta::assert_snapshot!(refuse_set("steps=5"), @"--set steps=5: wants section.key=value; write run.steps=5");
    insta::assert_snapshot!(refuse_set("run.steps"), @"--set run.steps: wants section.key=value, for example run.steps=100");
    insta::assert_snapshot!(refuse_set("run.step=5"), @"--set run.step: unknown key `run.step`; did you mean `steps`?");
    insta::assert_snapshot!(refuse_set("model.preset.x=5"), @"--set model.preset.x=5: preset is a value, not a section");
}

#[test]
fn not_toml_and_not_there() {
    let text = refuse("[model\npreset = 1");
    assert!(text.starts_with("emma.toml is not valid TOML:\n") && text.contains("line 1"), "{text}");
    let text = Config::load("no/such.toml".as_ref(), &[]).unwrap_err().to_string();
    assert!(text.starts_with("cannot read the configuration file no/such.toml: "), "{text}");
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*", setting in "\\PC*") {
        let _ = Config::parse(&text, "any", &[]);
        let _ = Config::parse(MINIMAL, "any", &[setting]);
    }

    #[test]
    fn no_value_panics(
        key in prop::sample::select(vec![
            "model.preset", "model.path", "model.rope_scaling", "data.train", "data.validation", "data.sequence_tokens",
            "data.tokenizer", "data.sequences_per_step", "data.sources", "data.packing", "data.long_documents", "data.format",
            "data.field", "data.loss_on", "data.malformed", "schedule.chunk_tokens", "schedule.keep", "schedule.keep_budget",
            "schedule.keep_host_budget",
            "schedule.loss_tile_tokens",
            "kv.page_tokens", "kv.selection", "kv.grad_dtype", "kv.device_budget", "kv.group_pages", "kv.prefetch_groups",
            "optimizer.lr", "optimizer.betas", "optimizer.clip_norm", "optimizer.warmup_steps", "run.out", "run.steps",
            "run.seed", "run.device", "run.threads",
        ]),
        value in "(window:|top_k:|cuda:|-)?[0-9]{0,20}(K|M|GiB|\\.5)?|\\[.{0,8}\\]|\\{.{0,8}\\}|\"?.{0,8}\"?",
    ) {
        if let Ok(config) = Config::parse(MINIMAL, "any", &[format!("{key}={value}")]) {
            prop_assert_eq!(Config::parse(&config.to_toml(), "resolved", &[]).unwrap(), config);
        }
    }
}
