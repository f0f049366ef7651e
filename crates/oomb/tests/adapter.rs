//! PEFT adapters in and out: what PEFT saved is read, merged to the loss that PEFT computed, and written as PEFT writes it; what
//! this program does not do is refused by name.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::checkpoint::{Adapter, AdapterExport, Checkpoint, DEFAULT_MAX_SHARD_BYTES, Export, WeightType, write, write_adapter};
use oomb::config::{ModelSettings, ModelSource};
use oomb::data::Sequence;
use oomb::engine::machine;
use oomb::kv::select::Selection;
use oomb::plan::Request;
use oomb::plan::optimizer::StateRequest;
use oomb::run::{ModelFiles, evaluator};
use oomb::train;
use oomb_device::DType;
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const NAMES: [&str; 4] = ["llama", "qwen2", "qwen3_packed", "llama_wide"];

fn golden(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder).join(name)
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn open(folder: &Path) -> ModelFiles {
    ModelFiles::open(&ModelSettings { source: ModelSource::Path(folder.to_owned()), rope_scaling: None }).unwrap()
}

/// The loss of a model on the ids of golden model `name`, in f64 arithmetic.
fn loss(files: &ModelFiles, name: &str) -> f64 {
    let golden_json = read_json(&golden("golden", name).join("golden.json"));
    let numbers = |key: &str| golden_json[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let mut starts = vec![0];
    starts.extend(numbers("documents").iter().scan(0, |end, length| {
        *end += *length as usize;
        Some(*end)
    }));
    starts.pop();
    let sequence = Sequence::packed(numbers("ids"), &starts);
    let device = Cpu::new(CpuOptions { real: Real::F64, ..CpuOptions::default() });
    let request = Request {
        model: files.config.clone(),
        sequence_tokens: sequence.ids.len(),
        sequences_per_step: 1,
        chunk_tokens: 16,
        page_tokens: 8,
        group_pages: 1,
        prefetch_groups: 1,
        loss_tile_tokens: None,
        device_budget: None,
        keep_budget: None,
        keep_host_budget: None,
        grad_dtype: DType::F32,
        lora: None,
        training: None,
        optimizer_state: StateRequest::default(),
    };
    let mut engine = evaluator(&device, &machine(&device, 1 << 30), &request, files, Selection::All).unwrap();
    train::evaluate(&mut engine, &sequence).unwrap().mean()
}

/// Beside the base, and merged into a folder: both have the loss of base + adapter in PEFT, up to the adapter's f32 factor and
/// the rounding of merged weights to f32.
#[test]
fn an_evaluation_and_a_merged_export_have_the_loss_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    for name in NAMES {
        let wanted = read_json(&golden("golden_lora", name).join("golden.json"))["loss"].as_f64().unwrap();
        let files = open(&golden("golden", name)).with_adapter(&golden("golden_lora", name)).unwrap();
        let beside = loss(&files, name);
        assert!((beside - wanted).abs() < 1e-7 * wanted, "{name}: {beside} {wanted}");
        assert!((loss(&open(&golden("golden", name)), name) - wanted).abs() > 1e-2, "{name}: the adapter does something");
        let export = Export {
            config: &files.config,
            config_json: files.config_json(),
            files: &[],
            weights: WeightType::F32,
            max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
        };
        let out = folder.path().join(name);
        write(&out, &export, |spec| {
            let tensors = spec.sources.iter().map(|(name, _)| files.tensor(name));
            Ok(tensors.collect::<Result<Vec<_>, _>>()?.iter().flat_map(|values| values.to_f32()).collect())
        })
        .unwrap();
        let merged = loss(&open(&out), name);
        assert!((merged - wanted).abs() < 1e-6 * wanted, "{name}: {merged} {wanted}");
    }
}

/// What is written again is what PEFT wrote: the same tensors to the bit, the same settings.
#[test]
fn what_is_written_is_what_peft_wrote() {
    let folder = tempfile::tempdir().unwrap();
    for name in NAMES {
        let (source, out) = (golden("golden_lora", name), folder.path().join(name));
        let model = Checkpoint::open(&golden("golden", name)).unwrap().config().clone();
        let adapter = Adapter::open(&source, &model).unwrap();
        let export = AdapterExport { model: &model, lora: adapter.lora(), base: Some("models/base") };
        write_adapter(&out, &export, |spec| Ok(adapter.tensor(&spec.sources[0].0)?.to_f32())).unwrap();
        let [ours, theirs] = [&out, &source].map(|folder| fs::read(folder.join("adapter_model.safetensors")).unwrap());
        let [ours, theirs] = [&ours, &theirs].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(ours.len(), theirs.len());
        for (tensor, view) in theirs.iter() {
            let got = ours.tensor(tensor).unwrap();
            assert_eq!((got.dtype(), got.shape(), got.data()), (view.dtype(), view.shape(), view.data()), "{tensor}");
        }
        let [ours, mut theirs] = [&out, &source].map(|folder| read_json(&folder.join("adapter_config.json")));
        theirs["base_model_name_or_path"] = json!("models/base");
        for (key, value) in ours.as_object().unwrap() {
            let sorted = |value: &Value| {
                let mut names: Vec<String> = serde_json::from_value(value.clone()).unwrap();
                names.sort();
                names
            };
            match key.as_str() {
                "target_modules" => assert_eq!(sorted(value), sorted(&theirs[key]), "{name}"),
                _ => assert_eq!(*value, theirs[key], "{name}: {key}"),
            }
        }
        assert!(write_adapter(&out, &export, |_| panic!("asked before anything is written")).is_err());
    }
}

/// The golden adapter with some settings changed, as an error.
fn refused(changes: &[(&str, Value)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let source = golden("golden_lora", "llama");
    let mut config = read_json(&source.join("adapter_config.json"));
    for (key, value) in changes {
        config[key] = value.clone();
    }
    fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    fs::copy(source.join("adapter_model.safetensors"), folder.path().join("adapter_model.safetensors")).unwrap();
    let model = Checkpoint::open(&golden("golden", "llama")).unwrap().config().clone();
    match Adapter::open(folder.path(), &model) {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string().replace(&folder.path().display().to_string(), "…"),
    }
}

#[test]
fn features_that_are_not_here_are_refused_by_name() {
    for harmless in [
        ("revision", json!("main")),
        ("init_lora_weights", json!("gaussian")),
        ("inference_mode", json!(false)),
        ("lora_dropout", json!(0.05)),
        ("target_modules", json!("all-linear")),
        ("a_key_of_tomorrow", json!(null)),
    ] {
        assert_eq!(refused(std::slice::from_ref(&harmless)), "accepted", "{harmless:?}");
    }
    let messages = [
        ("use_dora", json!(true)),
        ("bias", json!("lora_only")),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("layers_to_transform", json!([0])),
        ("fan_in_fan_out", json!(true)),
        ("target_modules", json!(["q_proj", "lm_head"])),
        ("target_parameters", json!(["experts.w1"])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("a_key_of_tomorrow", json!(true)),
        ("peft_type", json!("IA3")),
        ("task_type", json!("SEQ_CLS")),
        ("r", json!(0)),
        ("lora_alpha", json!("8")),
    ]
    .map(|change| refused(&[change]));
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn adapters_of_other_models_are_refused() {
    let other = |adapter: &str, model: &str| {
        let model = Checkpoint::open(&golden("golden", model)).unwrap().config().clone();
        let error = Adapter::open(&golden("golden_lora", adapter), &model).err().unwrap().to_string();
        error.replace(&golden("golden_lora", adapter).display().to_string(), "…")
    };
    let empty = tempfile::tempdir().unwrap();
    let model = Checkpoint::open(&golden("golden", "llama")).unwrap().config().clone();
    let none = Adapter::open(&empty.path().join("none"), &model).err().unwrap().to_string();
    let not_one = Adapter::open(empty.path(), &model).err().unwrap().to_string();
    let shown = |text: String| text.replace(&empty.path().display().to_string(), "…");
    let all = [other("qwen2", "llama"), other("llama", "qwen3"), refused(&[("r", json!(4))]), shown(none), shown(not_one)];
    insta::assert_snapshot!(all.join("\n"));
}
