//! `adapter_config.json`, read and written. It must not know tensors.
//!
//! What PEFT can do and this program cannot is refused by name: keys that would change what is computed, and keys that are not
//! known here unless they are off.

use crate::model::families::ConfigError;
use crate::model::lora::{LoraConfig, Target};
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ConfigError>;

/// What the file says, but for the projections.
pub(super) struct Settings {
    pub lora: LoraConfig,
    pub dropout: f64,
}

/// Keys that change nothing that is computed here: notes, settings of the start (the factors are saved as they are), and
/// parameters of features that have a switch of their own.
const HARMLESS: [&str; 19] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Starts that change the base's weights, without which the adapter means nothing.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

const WITHOUT: &str = "train and save the adapter without it";

fn unsupported(key: &str, got: &Value, advice: &str) -> ConfigError {
    ConfigError::Unsupported { key: key.to_owned(), got: got.to_string(), advice: advice.to_owned() }
}

fn wrong(key: &str, wanted: &str, got: &Value) -> ConfigError {
    ConfigError::Wrong { key: key.to_owned(), wanted: wanted.to_owned(), got: got.to_string() }
}

pub(super) fn read(json: &Value) -> Result<Settings> {
    let Some(map) = json.as_object() else { return Err(wrong("adapter_config.json", "an object", json)) };
    refuse(map)?;
    let missing = |key: &str, wanted: &str| ConfigError::Missing { key: key.to_owned(), wanted: wanted.to_owned() };
    let rank = map.get("r").ok_or_else(|| missing("r", "a positive whole number"))?;
    let positive = rank.as_u64().filter(|&rank| rank > 0 && rank < 1 << 32);
    let positive = positive.ok_or_else(|| wrong("r", "a positive whole number", rank))?;
    let alpha = map.get("lora_alpha").ok_or_else(|| missing("lora_alpha", "a number"))?;
    let alpha = alpha.as_f64().ok_or_else(|| wrong("lora_alpha", "a number", alpha))?;
    let rslora = map.get("use_rslora").map_or(Some(false), Value::as_bool);
    let rslora = rslora.ok_or_else(|| wrong("use_rslora", "true or false", &map["use_rslora"]))?;
    let dropout = map.get("lora_dropout").map_or(Some(0.0), Value::as_f64);
    let dropout = dropout.ok_or_else(|| wrong("lora_dropout", "a number", &map["lora_dropout"]))?;
    Ok(Settings { lora: LoraConfig { rank: positive as usize, alpha, rslora, targets: Vec::new() }, dropout })
}

/// Everything that this program would compute differently.
fn refuse(map: &Map<String, Value>) -> Result<()> {
    match map.get("peft_type") {
        Some(Value::String(kind)) if kind == "LORA" => {}
        Some(other) => return Err(unsupported("peft_type", other, "only \"LORA\" is")),
        None => return Err(ConfigError::Missing { key: "peft_type".to_owned(), wanted: "\"LORA\"".to_owned() }),
    }
    for (key, value) in map {
        match key.as_str() {
            "task_type" if !value.is_null() && value != "CAUSAL_LM" => {
                return Err(unsupported(key, value, "only \"CAUSAL_LM\" is"));
            }
            "bias" if value != "none" && is_on(value) => return Err(unsupported(key, value, "biases are not trained: \"none\"")),
            "bias" => {}
            "init_lora_weights" if CHANGES_BASE.iter().any(|start| value.as_str().is_some_and(|v| v.starts_with(start))) => {
                let advice = "this start changes the base's weights as well: convert the adapter with PEFT first \
                              (path_initial_model_for_weight_conversion)";
                return Err(unsupported(key, value, advice));
            }
            "target_modules" => refuse_modules(value)?,
            known if HARMLESS.contains(&known) => {}
            "use_dora" if is_on(value) => return Err(unsupported(key, value, "DoRA is not implemented")),
            _ if is_on(value) => return Err(unsupported(key, value, WITHOUT)),
            _ => {}
        }
    }
    Ok(())
}

/// Neither null, false, 0 nor empty.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// A list may name modules by their ends; a pattern says nothing that the tensors do not.
fn refuse_modules(value: &Value) -> Result<()> {
    let Some(modules) = value.as_array() else { return Ok(()) };
    for module in modules {
        let name = module.as_str().and_then(|path| path.rsplit('.').next()).unwrap_or_default();
        if Target::parse(name).is_none() {
            return Err(unsupported("target_modules", module, "adapters are for projections of layers (q_proj … down_proj)"));
        }
    }
    Ok(())
}

pub(super) fn write(lora: &LoraConfig, base: Option<&str>) -> Value {
    // Whole numbers as PEFT's own default has them.
    let alpha = if lora.alpha.fract() == 0.0 && lora.alpha.abs() < 1e15 { json!(lora.alpha as i64) } else { json!(lora.alpha) };
    let targets: Vec<_> = lora.targets.iter().map(|target| target.name()).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": null,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": false,
    })
}
