//! `Qwen3ForCausalLM`, dense: q and k are normed per head, no biases. It must not know the other families.

use super::{Family, Keys, ModelConfig, Result, ShapeDefaults, read_shape};
use serde_json::{Map, Value, json};

/// `Qwen3Config.head_dim` where the file does not say.
const DEFAULT_HEAD_DIM: usize = 128;

pub(super) fn read(keys: &Keys) -> Result<ModelConfig> {
    keys.refuse_true("attention_bias", "it puts a bias on the output projection too, which no supported family has")?;
    let defaults = ShapeDefaults { head_dim: Some(DEFAULT_HEAD_DIM), kv_heads_may_be_missing: false };
    Ok(ModelConfig { qk_norm: true, ..read_shape(keys, Family::Qwen3, defaults)? })
}

pub(super) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    map.insert("attention_bias".into(), json!(false));
    map.insert("use_sliding_window".into(), json!(false));
    map.insert("head_dim".into(), json!(config.head_dim));
}
