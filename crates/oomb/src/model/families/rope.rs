//! The rope settings of a `config.json`, in both styles of transformers. It must not know the frequencies they lead to.
//!
//! Precedence and defaults are those of transformers (`RotaryEmbeddingConfigMixin`): `rope_scaling` before
//! `rope_parameters`; a theta inside before one beside; `original_max_position_embeddings` beside before inside, then
//! `max_position_embeddings`; `dynamic` always counts from `max_position_embeddings`.

use super::{ConfigError, Keys, Map, ModelConfig, Result, Value, json};
use crate::model::config::{RopeConfig, RopeScaling};

const TYPES: [&str; 5] = ["default", "linear", "dynamic", "llama3", "yarn"];
const PARAMETERS: [&str; 15] = [
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "finetuned", // carried by some YaRN checkpoints, read by nobody
];

/// What holds where the parameters themselves are silent.
pub(super) struct Defaults {
    pub theta: f64,
    pub original: Option<usize>,
    pub max_position: usize,
}

pub(super) fn read(keys: &Keys, max_position: usize) -> Result<RopeConfig> {
    let theta = keys.optional_positive("rope_theta")?.unwrap_or(10_000.0);
    refuse_partial(keys)?;
    let defaults = Defaults { theta, original: keys.optional_count("original_max_position_embeddings")?, max_position };
    for (key, prefix) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
        match keys.get(key) {
            Some(Value::Object(parameters)) if parameters.is_empty() => {}
            Some(Value::Object(parameters)) => return parse(&Keys::new(parameters, prefix), defaults),
            Some(other) => return Err(keys.wrong(key, "an object or null", super::keys::shown(other))),
            None => {}
        }
    }
    Ok(RopeConfig { theta, scaling: RopeScaling::None })
}

pub(super) fn parse(keys: &Keys, defaults: Defaults) -> Result<RopeConfig> {
    let kind = match keys.optional_str("rope_type")? {
        Some(kind) => kind,
        None => keys.optional_str("type")?.unwrap_or("default"),
    };
    let theta = keys.optional_positive("rope_theta")?.unwrap_or(defaults.theta);
    let original = match (defaults.original, keys.optional_count("original_max_position_embeddings")?) {
        (Some(original), _) | (None, Some(original)) => original,
        (None, None) => defaults.max_position,
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: factor(keys)? },
        "dynamic" => RopeScaling::Dynamic { factor: factor(keys)?, original: defaults.max_position },
        "llama3" => llama3(keys, original)?,
        "yarn" => yarn(keys, original, defaults.max_position)?,
        other => {
            let advice = format!("supported are {}", TYPES.join(", "));
            return Err(keys.unsupported("rope_type", format!("\"{other}\""), advice));
        }
    };
    refuse_partial(keys)?;
    if let Some(unknown) = keys.names().find(|name| !PARAMETERS.contains(name)) {
        return Err(keys.unsupported(unknown, "…", format!("known parameters are {}", PARAMETERS[1..14].join(", "))));
    }
    Ok(RopeConfig { theta, scaling })
}

fn refuse_partial(keys: &Keys) -> Result<()> {
    match keys.optional_f64("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            Err(keys.unsupported("partial_rotary_factor", part.to_string(), "whole heads are rotated, it must be 1.0"))
        }
        _ => Ok(()),
    }
}

/// Factors below 1 would shorten the context: transformers warns, and computes.
fn factor(keys: &Keys) -> Result<f64> {
    let factor = keys.positive("factor")?;
    if factor < 1.0 {
        return Err(keys.wrong("factor", "a number of at least 1", factor.to_string()));
    }
    Ok(factor)
}

fn llama3(keys: &Keys, original: usize) -> Result<RopeScaling> {
    let (low, high) = (keys.positive("low_freq_factor")?, keys.positive("high_freq_factor")?);
    if high <= low {
        return Err(keys.wrong("high_freq_factor", format!("more than low_freq_factor ({low})"), high.to_string()));
    }
    Ok(RopeScaling::Llama3 { factor: factor(keys)?, low_freq_factor: low, high_freq_factor: high, original })
}

fn yarn(keys: &Keys, original: usize, max_position: usize) -> Result<RopeScaling> {
    // A factor of null means: by how much the length has grown. One that is absent is a mistake.
    let factor = match keys.get("factor") {
        None if keys.mentions("factor") => max_position as f64 / original as f64,
        _ => factor(keys)?,
    };
    let beta_fast = keys.optional_positive("beta_fast")?.unwrap_or(32.0);
    let beta_slow = keys.optional_positive("beta_slow")?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(keys.wrong("beta_fast", format!("at least beta_slow ({beta_slow})"), beta_fast.to_string()));
    }
    // Either one at zero, or absent, disables both.
    let nonzero = |key| keys.optional_f64(key).map(|scale| scale.filter(|&scale| scale != 0.0));
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor: keys.optional_positive("attention_factor")?,
        beta_fast,
        beta_slow,
        mscale: nonzero("mscale")?.zip(nonzero("mscale_all_dim")?),
        truncate: keys.optional_bool("truncate")?.unwrap_or(true),
        original,
    })
}

/// Puts the model's rope into `map`, in the style that `map` has already; unchanged settings stay as they were written.
pub(super) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let unchanged: std::result::Result<RopeConfig, ConfigError> = read(&Keys::new(map, ""), config.max_position_embeddings);
    let mentioned = ["rope_theta", "rope_scaling", "rope_parameters"].iter().any(|&key| map.contains_key(key));
    if mentioned && unchanged.is_ok_and(|rope| rope == config.rope) {
        return;
    }
    let is_v5 = map.contains_key("rope_parameters") && !map.contains_key("rope_scaling");
    map.remove("original_max_position_embeddings");
    let mut parameters = parameters(&config.rope.scaling);
    if is_v5 {
        map.remove("rope_theta");
        parameters.insert("rope_theta".into(), json!(config.rope.theta));
        map.insert("rope_parameters".into(), Value::Object(parameters));
    } else {
        map.remove("rope_parameters");
        map.insert("rope_theta".into(), json!(config.rope.theta));
        let scaling = if config.rope.scaling == RopeScaling::None { Value::Null } else { Value::Object(parameters) };
        map.insert("rope_scaling".into(), scaling);
    }
}

fn parameters(scaling: &RopeScaling) -> Map<String, Value> {
    let value = match scaling {
        RopeScaling::None => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original,
        }),
        RopeScaling::Yarn { factor, attention_factor, beta_fast, beta_slow, mscale, truncate, original } => {
            let mut value = json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "truncate": truncate,
            });
            if let Some(attention_factor) = attention_factor {
                value["attention_factor"] = json!(attention_factor);
            }
            if let Some((mscale, mscale_all_dim)) = mscale {
                value["mscale"] = json!(mscale);
                value["mscale_all_dim"] = json!(mscale_all_dim);
            }
            value
        }
    };
    match value {
        Value::Object(map) => map,
        _ => unreachable!("every arm above is an object"),
    }
}
