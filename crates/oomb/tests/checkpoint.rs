//! Checkpoints in and out: round trips, shards, and every way in which a folder can be wrong.

use half::bf16;
use oomb::checkpoint::{Checkpoint, DEFAULT_MAX_SHARD_BYTES, Error, Export, Values, WeightType, tokenizer_files, write};
use oomb::model::params::param_specs;
use oomb::model::presets::preset;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn load(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).expect("a weight file");
    let file = SafeTensors::deserialize(&bytes).expect("valid safetensors");
    file.iter().map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

fn save(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).expect("bytes of the right number"))
    });
    safetensors::serialize_to_file(views, None, path).expect("a writable folder");
}

/// A copy of a golden checkpoint whose tensors `change` may spoil.
fn spoilt(name: &str, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    std::fs::copy(golden(name).join("config.json"), folder.path().join("config.json")).expect("a golden config.json");
    let mut tensors = load(&golden(name).join("model.safetensors"));
    change(&mut tensors);
    save(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// The message, without the folder's name and with paths cut to file names.
fn refusal(folder: &Path) -> String {
    let error = Checkpoint::open(folder).err().expect("this checkpoint is wrong");
    error.to_string().replace(&format!("{}/", folder.display()), "").replace(&folder.display().to_string(), "FOLDER")
}

/// Our parameters, put together from a checkpoint's tensors.
fn parameter(checkpoint: &Checkpoint, spec: &oomb::model::params::ParamSpec) -> Vec<f32> {
    spec.sources.iter().flat_map(|(name, _)| checkpoint.tensor(name).expect("readable").to_f32()).collect()
}

#[test]
fn golden_checkpoints_open_and_read_exactly() {
    for name in ["llama", "llama_tied", "qwen2", "qwen3"] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        let tensors = load(&golden(name).join("model.safetensors"));
        let mut count = 0;
        for spec in param_specs(checkpoint.config()) {
            for (tensor, rows) in &spec.sources {
                let (_, shape, bytes) = &tensors[tensor];
                assert_eq!((checkpoint.shape(tensor), shape[0]), (shape.as_slice(), rows.len()));
                let wanted = floats(bytes);
                assert_eq!(checkpoint.tensor(tensor).unwrap(), Values::F32(wanted));
                count += 1;
            }
        }
        assert_eq!(count, tensors.len(), "{name}");
    }
}

fn export_to(out: &Path, checkpoint: &Checkpoint, weights: WeightType, max_shard_bytes: u64) -> Result<(), Error> {
    let files = tokenizer_files(checkpoint.folder());
    let config_json = Some(checkpoint.config_json());
    let export = Export { config: checkpoint.config(), config_json, files: &files, weights, max_shard_bytes };
    write(out, &export, |spec| Ok(parameter(checkpoint, spec)))
}

#[test]
fn what_is_written_reads_back() {
    for name in ["llama", "llama_tied", "qwen2", "qwen3"] {
        let folder = TempDir::new().unwrap();
        let source = Checkpoint::open(&golden(name)).unwrap();
        let whole = load(&golden(name).join("model.safetensors"));
        for (weights, max_shard_bytes) in [
            (WeightType::F32, DEFAULT_MAX_SHARD_BYTES),
            (WeightType::F32, 9000),
            (WeightType::F32, 1), // a tensor is never split
            (WeightType::Bf16, DEFAULT_MAX_SHARD_BYTES),
            (WeightType::Bf16, 5000),
        ] {
            let out = folder.path().join(format!("nested/{weights:?}-{max_shard_bytes}"));
            export_to(&out, &source, weights, max_shard_bytes).unwrap();
            let files: Vec<PathBuf> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
            let mut written = Tensors::new();
            for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
                let shard = load(path);
                let bytes: u64 = shard.values().map(|(_, _, data)| data.len() as u64).sum();
                assert!(bytes <= max_shard_bytes || shard.len() == 1, "{} has {bytes} bytes", path.display());
                written.extend(shard);
            }
            let sharded = max_shard_bytes < DEFAULT_MAX_SHARD_BYTES;
            assert_eq!(out.join("model.safetensors.index.json").exists(), sharded);
            assert_eq!(out.join("model.safetensors").exists(), !sharded);
            assert_eq!(written.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
            let back = Checkpoint::open(&out).unwrap();
            assert_eq!(back.config(), source.config());
            for (name, (_, _, data)) in &whole {
                let exact = floats(data);
                let wanted = match weights {
                    WeightType::F32 => Values::F32(exact),
                    WeightType::Bf16 => Values::Bf16(exact.iter().map(|&x| bf16::from_f32(x)).collect()),
                };
                assert_eq!(back.tensor(name).unwrap(), wanted);
            }
        }
        let left = std::fs::read_dir(folder.path().join("nested")).unwrap().count();
        assert_eq!(left, 5, "temporary folders are gone");
    }
}

#[test]
fn export_of_a_preset_needs_no_source() {
    let folder = TempDir::new().unwrap();
    let config = preset("tiny").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let files = tokenizer_files(folder.path());
    let export = Export {
        config: &config,
        config_json: None,
        files: &files,
        weights: WeightType::F32,
        max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
    };
    let out = folder.path().join("out");
    write(&out, &export, |spec| Ok((0..spec.len()).map(|i| i as f32).collect())).unwrap();
    let checkpoint = Checkpoint::open(&out).unwrap();
    assert_eq!(checkpoint.config(), &config);
    assert_eq!(std::fs::read_to_string(out.join("tokenizer.json")).unwrap(), "{}");
    // The second source of a fused parameter starts where the first ended.
    let up = checkpoint.tensor("model.layers.1.mlp.up_proj.weight").unwrap();
    assert_eq!(up.to_f32()[0], (config.intermediate_size * config.hidden_size) as f32);
}

#[test]
fn nothing_is_overwritten_and_nothing_half_written_stays() {
    let folder = TempDir::new().unwrap();
    let source = Checkpoint::open(&golden("llama")).unwrap();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    export_to(&out, &source, WeightType::F32, DEFAULT_MAX_SHARD_BYTES).unwrap(); // an empty folder is free
    let error = export_to(&out, &source, WeightType::F32, DEFAULT_MAX_SHARD_BYTES).unwrap_err().to_string();
    assert!(error.ends_with("out exists and is not empty: choose another folder, or remove it; nothing was written"), "{error}");
    let file = folder.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let error = export_to(&file, &source, WeightType::F32, DEFAULT_MAX_SHARD_BYTES).unwrap_err().to_string();
    assert!(error.ends_with("file is a file: choose another name; nothing was written"), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");

    let export = Export {
        config: source.config(),
        config_json: None,
        files: &[],
        weights: WeightType::F32,
        max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
    };
    let mut calls = 0;
    let failed = write(&folder.path().join("failed"), &export, |spec| {
        calls += 1;
        match calls {
            3 => Err(oomb_device::Error::Failed { op: "download".into(), detail: "gone".into() }.into()),
            _ => Ok(parameter(&source, spec)),
        }
    });
    assert_eq!(failed.unwrap_err().to_string(), "the device failed while running download: gone");
    let mut names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["file", "out"]);
}

#[test]
fn harmless_extras_are_ignored() {
    let with_frequencies = spoilt("llama", |tensors| {
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![4], vec![0; 16]));
    });
    Checkpoint::open(with_frequencies.path()).unwrap();
    let with_head = spoilt("llama_tied", |tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), embedding);
    });
    Checkpoint::open(with_head.path()).unwrap();
}

#[test]
fn half_precision_is_read_as_it_is() {
    let folder = spoilt("llama_tied", |tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        let halves: Vec<half::f16> = floats(&norm.2).into_iter().map(half::f16::from_f32).collect();
        *norm = (Dtype::F16, norm.1.clone(), bytemuck::cast_slice(&halves).to_vec());
    });
    let values = Checkpoint::open(folder.path()).unwrap().tensor("model.norm.weight").unwrap();
    assert!(matches!(values, Values::F16(ref halves) if halves.len() == 16), "{values:?}");
}

#[test]
fn wrong_tensors_are_listed() {
    let rename = |tensors: &mut Tensors, from: &str, to: &str| {
        let tensor = tensors.remove(from).expect("a tensor of the model");
        tensors.insert(to.into(), tensor);
    };
    let cases = [
        spoilt("llama", |tensors| drop(tensors.remove("model.layers.1.mlp.down_proj.weight"))),
        spoilt("llama", |tensors| drop(tensors.remove("lm_head.weight"))),
        spoilt("qwen2", |tensors| tensors.retain(|name, _| !name.contains("layers.1."))),
        spoilt("llama", |tensors| rename(tensors, "model.norm.weight", "model.norm.bias")),
        spoilt("llama", |tensors| {
            let query = tensors.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap();
            query.1.reverse();
        }),
        spoilt("llama", |tensors| {
            tensors.insert("model.norm.weight".into(), (Dtype::F64, vec![16], vec![0; 128]));
        }),
        spoilt("llama_tied", |tensors| {
            let mut other = tensors["model.embed_tokens.weight"].clone();
            other.2[5] ^= 1;
            tensors.insert("lm_head.weight".into(), other);
        }),
        spoilt("qwen3", |tensors| {
            rename(tensors, "model.layers.2.self_attn.k_norm.weight", "model.layers.2.self_attn.k_proj.bias")
        }),
    ];
    let messages: Vec<String> = cases.iter().map(|folder| refusal(folder.path())).collect();
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn damaged_files_are_refused() {
    let damaged = |change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let folder = spoilt("llama", |_| {});
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, change(std::fs::read(&path).expect("just written"))).expect("a writable folder");
        refusal(folder.path())
    };
    let with_header = |header: Value, data_bytes: usize| {
        let text = header.to_string();
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        bytes
    };
    let entry = |begin: usize, end: usize| json!({"dtype": "F32", "shape": [2], "data_offsets": [begin, end]});
    let messages = [
        damaged(&|bytes| bytes[..bytes.len() - 1].to_vec()),
        damaged(&|bytes| bytes[..100].to_vec()),
        damaged(&|bytes| bytes[..3].to_vec()),
        damaged(&|_| vec![]),
        damaged(&|mut bytes| {
            bytes.push(0);
            bytes
        }),
        damaged(&|mut bytes| {
            bytes[8] = b'[';
            bytes
        }),
        damaged(&|_| b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".to_vec()),
        damaged(&|_| with_header(json!({"a": entry(0, 12)}), 12)),
        damaged(&|_| with_header(json!({"a": entry(8, 0)}), 8)),
        damaged(&|_| with_header(json!({"a": entry(0, 8), "b": entry(0, 8)}), 8)),
        damaged(&|_| with_header(json!({"a": {"dtype": "F32", "shape": [u64::MAX, 4], "data_offsets": [0, 8]}}), 8)),
        damaged(&|_| with_header(json!({"a": {"dtype": "F32", "shape": [2]}}), 8)),
    ];
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn incomplete_folders_are_refused() {
    let sharded = |change: &dyn Fn(&Path)| {
        let folder = TempDir::new().expect("a temporary folder");
        let out = folder.path().join("out");
        let source = Checkpoint::open(&golden("llama")).expect("a golden checkpoint");
        export_to(&out, &source, WeightType::F32, 20_000).expect("a free folder");
        change(&out);
        refusal(&out)
    };
    let edit_index = |out: &Path, edit: &dyn Fn(&mut Value)| {
        let path = out.join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).expect("an index")).expect("JSON");
        edit(&mut index);
        std::fs::write(&path, index.to_string()).expect("a writable folder");
    };
    let second = "model-00002-of-00002.safetensors";
    let messages = [
        sharded(&|out| std::fs::remove_file(out.join("config.json")).expect("it is there")),
        sharded(&|out| std::fs::remove_dir_all(out).expect("it is there")),
        sharded(&|out| std::fs::remove_file(out.join("model.safetensors.index.json")).expect("it is there")),
        sharded(&|out| std::fs::remove_file(out.join(second)).expect("it is there")),
        sharded(&|out| std::fs::write(out.join("config.json"), "{").expect("a writable folder")),
        sharded(&|out| std::fs::write(out.join("config.json"), r#"{"model_type": "gpt2"}"#).expect("a writable folder")),
        sharded(&|out| edit_index(out, &|index| index["weight_map"]["model.norm.weight"] = json!("../elsewhere.safetensors"))),
        sharded(&|out| {
            let first = json!("model-00001-of-00002.safetensors");
            edit_index(out, &|index| index["weight_map"]["model.norm.weight"] = first.clone());
        }),
        sharded(&|out| edit_index(out, &|index| index["weight_map"] = json!([1]))),
        sharded(&|out| {
            std::fs::copy(out.join(second), out.join("z.safetensors")).expect("a writable folder");
            edit_index(out, &|index| index["weight_map"]["model.norm.weight"] = json!("z.safetensors"));
        }),
    ];
    insta::assert_snapshot!(messages.join("\n"));
}
