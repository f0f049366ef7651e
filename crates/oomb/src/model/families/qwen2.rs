//! `Qwen2ForCausalLM`: Qwen2 and Qwen2.5, dense; q, k and v have a bias. It must not know the other families.

use super::{Family, Keys, ModelConfig, Result, ShapeDefaults, read_shape};
use serde_json::{Map, Value, json};

pub(super) fn read(keys: &Keys) -> Result<ModelConfig> {
    keys.refuse_true("use_mrope", "multimodal rotary embedding is not implemented")?;
    let shape = read_shape(keys, Family::Qwen2, ShapeDefaults { head_dim: None, kv_heads_may_be_missing: false })?;
    Ok(ModelConfig { qkv_bias: true, ..shape })
}

pub(super) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    map.insert("use_sliding_window".into(), json!(false));
    // Qwen2 checkpoints have no head_dim; other programs derive it.
    if config.head_dim * config.num_heads != config.hidden_size || map.contains_key("head_dim") {
        map.insert("head_dim".into(), json!(config.head_dim));
    }
}
