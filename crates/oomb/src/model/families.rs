//! From a checkpoint's `config.json` to a [`ModelConfig`] and back, per family. It must not know weights or maths: what
//! cannot be represented exactly is refused here, by name, before anything is loaded.

mod keys;
mod llama;
mod qwen2;
mod qwen3;
mod rope;

use super::config::{Family, ModelConfig};
use keys::Keys;
use serde_json::{Map, Value, json};

/// What is wrong with a `config.json`. Whoever read the file adds its path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key that has no safe default is absent or null.
    #[error("{key} is missing: wanted {wanted}")]
    Missing {
        /// Dotted key.
        key: String,
        /// What belongs there.
        wanted: String,
    },
    /// A value of another type, out of range, or at odds with another key.
    #[error("{key}: wanted {wanted}, got {got}")]
    Wrong {
        /// Dotted key.
        key: String,
        /// What would be accepted.
        wanted: String,
        /// What is there.
        got: String,
    },
    /// A valid setting that this program does not implement.
    #[error("{key} = {got} is not supported: {advice}")]
    Unsupported {
        /// Dotted key.
        key: String,
        /// What is there.
        got: String,
        /// What is supported, or what to change.
        advice: String,
    },
}

/// Result with [`ConfigError`].
pub type Result<T> = std::result::Result<T, ConfigError>;

const FAMILIES: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Qwen3];

impl Family {
    /// `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The entry of `architectures` in `config.json`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Reads a `config.json` in the style of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
///
/// # Errors
/// Names the key, what was wanted and what was there: for keys that are missing or of the wrong type, for shapes that do
/// not divide, and for everything that would silently change the model (another activation or rope type, biases, sliding
/// windows, dropout, quantised weights).
pub fn from_config_json(value: &Value) -> Result<ModelConfig> {
    let Some(map) = value.as_object() else {
        return Err(ConfigError::Wrong { key: "config.json".into(), wanted: "an object".into(), got: keys::shown(value) });
    };
    let keys = Keys::new(map, "");
    let family = family(&keys)?;
    refuse_common(&keys)?;
    let config = match family {
        Family::Llama => llama::read(&keys)?,
        Family::Qwen2 => qwen2::read(&keys)?,
        Family::Qwen3 => qwen3::read(&keys)?,
    };
    check_shape(&config)?;
    Ok(config)
}

/// Writes `config` as a `config.json`. Keys of `source`, the file that the model came from, are kept where the model does
/// not say otherwise: token ids, `transformers_version`, the style of the rope settings. `dtype` is `"bfloat16"` or
/// `"float32"`.
pub fn to_config_json(config: &ModelConfig, source: Option<&Value>, dtype: &str) -> Value {
    let mut map = source.and_then(Value::as_object).cloned().unwrap_or_default();
    map.insert("architectures".into(), json!([config.family.architecture()]));
    map.insert("model_type".into(), json!(config.family.model_type()));
    let counts = [
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_hidden_layers", config.num_layers),
        ("num_attention_heads", config.num_heads),
        ("num_key_value_heads", config.num_kv_heads),
        ("max_position_embeddings", config.max_position_embeddings),
    ];
    for (key, count) in counts {
        map.insert(key.into(), json!(count));
    }
    map.insert("hidden_act".into(), json!("silu"));
    map.insert("rms_norm_eps".into(), shortest(config.norm_eps));
    map.insert("initializer_range".into(), shortest(config.initializer_range));
    map.insert("tie_word_embeddings".into(), json!(config.tied_embeddings));
    match config.family {
        Family::Llama => llama::write(config, &mut map),
        Family::Qwen2 => qwen2::write(config, &mut map),
        Family::Qwen3 => qwen3::write(config, &mut map),
    }
    rope::write(config, &mut map);
    let dtype_key = if map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    map.insert(dtype_key.into(), json!(dtype));
    Value::Object(map)
}

/// Replaces a model's rope scaling by `parameters` in Hugging Face form (`{"rope_type": "yarn", "factor": 4.0, …}`); theta
/// stays unless `rope_theta` is given.
///
/// # Errors
/// As in [`from_config_json`], keys prefixed with `rope_scaling`.
pub fn replace_rope(config: &mut ModelConfig, parameters: &Map<String, Value>) -> Result<()> {
    let keys = Keys::new(parameters, "rope_scaling.");
    let defaults = rope::Defaults { theta: config.rope.theta, original: None, max_position: config.max_position_embeddings };
    config.rope = rope::parse(&keys, defaults)?;
    check_shape(config)
}

fn family(keys: &Keys) -> Result<Family> {
    let supported = || FAMILIES.map(|f| format!("{} ({})", f.model_type(), f.architecture())).join(", ");
    let unsupported = |key: &str, got: String| {
        Err(ConfigError::Unsupported { key: key.into(), got, advice: format!("supported are {}", supported()) })
    };
    let by_type = match keys.optional_str("model_type")? {
        Some(name) => match FAMILIES.into_iter().find(|f| f.model_type() == name) {
            Some(family) => Some(family),
            None => return unsupported("model_type", format!("\"{name}\"")),
        },
        None => None,
    };
    let Some(architectures) = keys.get("architectures") else {
        return by_type.ok_or_else(|| ConfigError::Missing { key: "model_type".into(), wanted: supported() });
    };
    let named = architectures.as_array().and_then(|a| FAMILIES.into_iter().find(|f| a.contains(&json!(f.architecture()))));
    match (by_type, named) {
        (_, None) => unsupported("architectures", keys::shown(architectures)),
        (Some(by_type), Some(named)) if by_type != named => Err(ConfigError::Wrong {
            key: "architectures".into(),
            wanted: format!("[\"{}\"], as model_type is \"{}\"", by_type.architecture(), by_type.model_type()),
            got: keys::shown(architectures),
        }),
        (_, Some(named)) => Ok(named),
    }
}

/// What no family here has.
fn refuse_common(keys: &Keys) -> Result<()> {
    let unsupported =
        |key: &str, got: String, advice: &str| Err(ConfigError::Unsupported { key: key.into(), got, advice: advice.into() });
    if let Some(act) = keys.optional_str("hidden_act")?
        && !matches!(act, "silu" | "swish")
    {
        return unsupported("hidden_act", format!("\"{act}\""), "the MLP is SwiGLU, hidden_act must be \"silu\"");
    }
    if keys.get("quantization_config").is_some() {
        return unsupported("quantization_config", "{…}".into(), "convert the checkpoint to bf16 or f32 weights first");
    }
    if let Some(dropout) = keys.optional_f64("attention_dropout")?
        && dropout != 0.0
    {
        return unsupported("attention_dropout", dropout.to_string(), "there is no dropout here, set it to 0.0");
    }
    keys.refuse_true("mlp_bias", "projections of the MLP have no bias here")?;
    keys.refuse_true(
        "use_sliding_window",
        "a checkpoint's per-layer window is not implemented; where max_window_layers >= num_hidden_layers no layer uses \
         it and it can be set to false; to train with a window set kv.selection = \"window:N\"",
    )?;
    if let Some(types) = keys.get("layer_types")
        && !types.as_array().is_some_and(|t| t.iter().all(|t| t == "full_attention"))
    {
        return unsupported("layer_types", keys::shown(types), "every layer must be \"full_attention\"");
    }
    Ok(())
}

/// The shape that all families share; `head_dim` where the file has none, `kv_heads` likewise.
fn read_shape(keys: &Keys, family: Family, defaults: ShapeDefaults) -> Result<ModelConfig> {
    let (hidden_size, num_heads) = (keys.count("hidden_size")?, keys.count("num_attention_heads")?);
    let head_dim = match (keys.optional_count("head_dim")?, defaults.head_dim) {
        (Some(head_dim), _) | (None, Some(head_dim)) => head_dim,
        (None, None) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        (None, None) => {
            return Err(ConfigError::Wrong {
                key: "num_attention_heads".into(),
                wanted: format!("a divisor of hidden_size ({hidden_size}), or head_dim"),
                got: num_heads.to_string(),
            });
        }
    };
    let num_kv_heads = match keys.optional_count("num_key_value_heads")? {
        Some(count) => count,
        None if defaults.kv_heads_may_be_missing => num_heads,
        None => keys.count("num_key_value_heads")?,
    };
    let max_position_embeddings = keys.count("max_position_embeddings")?;
    Ok(ModelConfig {
        family,
        vocab_size: keys.count("vocab_size")?,
        hidden_size,
        intermediate_size: keys.count("intermediate_size")?,
        num_layers: keys.count("num_hidden_layers")?,
        num_heads,
        num_kv_heads,
        head_dim,
        norm_eps: keys.positive("rms_norm_eps")? as f32,
        qkv_bias: false,
        qk_norm: false,
        tied_embeddings: keys.optional_bool("tie_word_embeddings")?.unwrap_or(false),
        max_position_embeddings,
        rope: rope::read(keys, max_position_embeddings)?,
        initializer_range: keys.optional_f64("initializer_range")?.unwrap_or(0.02) as f32,
    })
}

/// What transformers assumes where a family's `config.json` is silent.
struct ShapeDefaults {
    head_dim: Option<usize>,
    kv_heads_may_be_missing: bool,
}

fn check_shape(config: &ModelConfig) -> Result<()> {
    let wrong = |key: &str, wanted: String, got: usize| Err(ConfigError::Wrong { key: key.into(), wanted, got: got.to_string() });
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        let wanted = format!("a divisor of num_attention_heads ({})", config.num_heads);
        return wrong("num_key_value_heads", wanted, config.num_kv_heads);
    }
    if !config.head_dim.is_multiple_of(2) {
        return wrong("head_dim", "an even number (rotary embedding turns pairs)".into(), config.head_dim);
    }
    if config.head_dim < 4 && matches!(config.rope.scaling, super::config::RopeScaling::Dynamic { .. }) {
        return wrong("head_dim", "at least 4 for dynamic rope scaling".into(), config.head_dim);
    }
    Ok(())
}

/// The f64 that prints as the f32 does: 1e-6, not 9.999999974752427e-7.
fn shortest(value: f32) -> Value {
    json!(value.to_string().parse::<f64>().expect("a printed f32 is a number"))
}
