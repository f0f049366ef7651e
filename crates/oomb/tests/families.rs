//! config.json in and out: both styles of rope settings, everything that is refused, built-in shapes, frequencies.

use oomb::model::config::{Family, ModelConfig, RopeScaling};
use oomb::model::families::{from_config_json, replace_rope, to_config_json};
use oomb::model::params::param_specs;
use oomb::model::presets::{PRESETS, preset};
use oomb::model::rope::inv_freq;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json_file(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("golden files are JSON")
}

fn llama() -> Value {
    json_file(golden("llama/config.json"))
}

/// `base` with keys replaced; null removes nothing, it is a value.
fn with(base: &Value, changes: Value) -> Value {
    let mut value = base.clone();
    for (key, change) in changes.as_object().expect("changes are an object") {
        value[key] = change.clone();
    }
    value
}

fn without(base: &Value, key: &str) -> Value {
    let mut value = base.clone();
    value.as_object_mut().and_then(|map| map.remove(key)).expect("the key is there");
    value
}

#[test]
fn reads_the_golden_families() {
    let llama = from_config_json(&llama()).unwrap();
    assert_eq!(
        (llama.family, llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim),
        (Family::Llama, 2, 4, 2, 8)
    );
    assert_eq!((llama.vocab_size, llama.hidden_size, llama.intermediate_size), (61, 16, 28));
    assert!(!llama.tied_embeddings && !llama.qkv_bias && !llama.qk_norm);
    assert_eq!(llama.norm_eps, 1e-5);
    let qwen2 = from_config_json(&json_file(golden("qwen2/config.json"))).unwrap();
    assert!(qwen2.tied_embeddings && qwen2.qkv_bias && !qwen2.qk_norm);
    assert_eq!((qwen2.family, qwen2.head_dim, qwen2.rope.theta), (Family::Qwen2, 8, 1e6));
    let qwen3 = from_config_json(&json_file(golden("qwen3/config.json"))).unwrap();
    assert!(!qwen3.tied_embeddings && !qwen3.qkv_bias && qwen3.qk_norm);
    assert_eq!((qwen3.family, qwen3.head_dim, qwen3.rope.theta), (Family::Qwen3, 16, 1e6));
}

#[test]
fn export_and_import_agree() {
    let mut configs: Vec<(ModelConfig, Option<Value>)> = PRESETS.iter().map(|name| (preset(name).unwrap(), None)).collect();
    for entry in std::fs::read_dir(golden("")).unwrap() {
        let path = entry.unwrap().path().join("config.json");
        if path.exists() {
            let source = json_file(path);
            configs.push((from_config_json(&source).unwrap(), Some(source)));
        }
    }
    for case in json_file(golden("rope.json")).as_array().unwrap() {
        configs.push((from_config_json(&case["config"]).unwrap(), None));
    }
    assert!(configs.len() > 25, "the golden folder is incomplete");
    for (config, source) in configs {
        for source in [None, source.as_ref()] {
            let written = to_config_json(&config, source, "bfloat16");
            assert_eq!(from_config_json(&written).unwrap(), config, "{written:#}");
        }
    }
}

#[test]
fn export_keeps_what_it_does_not_know() {
    let source = with(&llama(), json!({"eos_token_id": [2, 7], "note": "mine"}));
    let written = to_config_json(&from_config_json(&source).unwrap(), Some(&source), "bfloat16");
    assert_eq!(written, with(&source, json!({"torch_dtype": "bfloat16"})));
    // Style 5 stays style 5, also where the rope changed.
    let source = json_file(golden("qwen3/config.json"));
    let mut config = from_config_json(&source).unwrap();
    config.rope.scaling = RopeScaling::Linear { factor: 2.0 };
    let written = to_config_json(&config, Some(&source), "float32");
    assert_eq!(written["rope_parameters"], json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}));
    assert!(written.get("rope_scaling").is_none() && written.get("rope_theta").is_none());
    assert_eq!((&written["dtype"], written.get("torch_dtype")), (&json!("float32"), None));
}

#[test]
fn both_rope_styles_mean_the_same() {
    let plain = without(&without(&llama(), "rope_scaling"), "rope_theta");
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    let v4 = with(&plain, json!({"rope_theta": 5e5, "rope_scaling": yarn}));
    let v5 = with(&plain, json!({"rope_parameters": with(&yarn, json!({"rope_theta": 5e5}))}));
    let old = with(
        &plain,
        json!({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}}),
    );
    assert_eq!(from_config_json(&v4).unwrap().rope, from_config_json(&v5).unwrap().rope);
    assert_eq!(from_config_json(&v4).unwrap().rope, from_config_json(&old).unwrap().rope);
    assert_eq!(from_config_json(&plain).unwrap().rope.theta, 10_000.0);
    // Without an original length, what the checkpoint says it supports; a factor of null is by how much that grew.
    let silent =
        with(&plain, json!({"rope_scaling": {"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 16}}));
    match from_config_json(&silent).unwrap().rope.scaling {
        RopeScaling::Yarn { factor, original, attention_factor: None, mscale: None, truncate: true, .. } => {
            assert_eq!((factor, original), (4.0, 16));
        }
        other => panic!("{other:?}"),
    }
    let default = with(&plain, json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}));
    assert!(matches!(from_config_json(&default).unwrap().rope.scaling, RopeScaling::Yarn { original: 64, .. }));
}

#[test]
fn rope_can_be_replaced() {
    let mut config = preset("qwen2.5-7b").unwrap();
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    replace_rope(&mut config, yarn.as_object().unwrap()).unwrap();
    assert_eq!(config.rope.theta, 1e6);
    assert!(matches!(config.rope.scaling, RopeScaling::Yarn { factor: 4.0, original: 32_768, .. }));
    let misspelt = json!({"rope_type": "yarn", "factor": 4.0, "beta_quick": 1});
    let error = replace_rope(&mut config, misspelt.as_object().unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("rope_scaling.beta_quick = … is not supported: known parameters are rope_type,"), "{error}");
}

#[test]
fn frequencies_are_those_of_transformers() {
    let cases = json_file(golden("rope.json"));
    for case in cases.as_array().unwrap() {
        let config = from_config_json(&case["config"]).unwrap();
        let (ours, scale) = inv_freq(&config, case["sequence_tokens"].as_u64().unwrap() as usize);
        let wanted: Vec<f64> = serde_json::from_value(case["inv_freq"].clone()).unwrap();
        assert_eq!(ours.len(), wanted.len());
        for (i, (ours, wanted)) in ours.iter().zip(&wanted).enumerate() {
            // Both are f64: some roundings of powers and products apart, magnified by the exponent of dynamic scaling.
            assert!((ours / wanted - 1.0).abs() < 1e-12, "{}: frequency {i}: {ours} instead of {wanted}", case["name"]);
        }
        assert_eq!(scale, case["scale"].as_f64().unwrap() as f32, "{}", case["name"]);
    }
    assert_eq!(cases.as_array().unwrap().len(), 12);
}

#[test]
fn presets_have_the_published_number_of_parameters() {
    // `total_parameters` of the published safetensors.
    let published = [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("tiny", 115_136),
    ];
    assert_eq!(published.len(), PRESETS.len());
    for (name, wanted) in published {
        let config = preset(name).unwrap();
        let count: usize = param_specs(&config).iter().map(|spec| spec.len()).sum();
        assert_eq!(count, wanted, "{name}");
    }
    assert_eq!(preset("qwen2.5-7B"), None);
}

#[test]
fn refusals_name_key_wanted_and_got() {
    let (llama, qwen2, qwen3) = (llama(), json_file(golden("qwen2/config.json")), json_file(golden("qwen3/config.json")));
    let scaled = |scaling: Value| with(&llama, json!({ "rope_scaling": scaling }));
    let cases = [
        json!([1]),
        with(&without(&llama, "architectures"), json!({"model_type": "mistral"})),
        with(&llama, json!({"architectures": ["LlamaForSequenceClassification"]})),
        with(&llama, json!({"model_type": "qwen2"})),
        without(&without(&llama, "architectures"), "model_type"),
        with(&llama, json!({"hidden_act": "gelu"})),
        with(&llama, json!({"attention_bias": true})),
        with(&qwen3, json!({"attention_bias": true})),
        with(&llama, json!({"mlp_bias": true})),
        with(&llama, json!({"attention_dropout": 0.1})),
        with(&llama, json!({"quantization_config": {"bits": 4}})),
        with(&qwen2, json!({"use_sliding_window": true})),
        with(&qwen3, json!({"layer_types": ["full_attention", "sliding_attention"]})),
        with(&llama, json!({"num_key_value_heads": 3})),
        with(&without(&llama, "head_dim"), json!({"num_attention_heads": 3})),
        with(&llama, json!({"head_dim": 7})),
        without(&llama, "hidden_size"),
        without(&qwen2, "num_key_value_heads"),
        with(&llama, json!({"vocab_size": "61"})),
        with(&llama, json!({"num_hidden_layers": 0})),
        with(&llama, json!({"rms_norm_eps": null})),
        with(&llama, json!({"partial_rotary_factor": 0.5})),
        with(&llama, json!({"rope_scaling": "yarn"})),
        scaled(json!({"rope_type": "longrope", "factor": 2.0})),
        scaled(json!({"rope_type": "linear"})),
        scaled(json!({"rope_type": "dynamic", "factor": 0.5})),
        scaled(json!({"rope_type": "yarn", "original_max_position_embeddings": 16})),
        scaled(json!({"rope_type": "yarn", "factor": 2, "mrope_section": [1]})),
        scaled(json!({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2})),
        scaled(json!({"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1})),
        scaled(json!({"rope_type": "llama3", "factor": 2, "low_freq_factor": "1", "high_freq_factor": 1})),
    ];
    let messages: Vec<String> = cases.iter().map(|case| from_config_json(case).unwrap_err().to_string()).collect();
    insta::assert_snapshot!(messages.join("\n"));
}
