//! `LlamaForCausalLM`: Llama 2 and 3, SmolLM2 and others of that shape. It must not know the other families.

use super::{Family, Keys, ModelConfig, Result, ShapeDefaults, read_shape};
use serde_json::{Map, Value, json};

pub(super) fn read(keys: &Keys) -> Result<ModelConfig> {
    keys.refuse_true("attention_bias", "it puts a bias on the output projection too, which no supported family has")?;
    read_shape(keys, Family::Llama, ShapeDefaults { head_dim: None, kv_heads_may_be_missing: true })
}

pub(super) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    map.insert("attention_bias".into(), json!(false));
    map.insert("mlp_bias".into(), json!(false));
    map.insert("head_dim".into(), json!(config.head_dim));
}
