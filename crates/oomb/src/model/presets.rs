//! Shapes of published models, and one small enough for two CPU cores. It must not know weights: a preset is trained from
//! random ones, or planned.

use super::config::{Family, ModelConfig, RopeConfig, RopeScaling};

/// Every name that [`preset`] knows.
pub const PRESETS: [&str; 10] = [
    "tiny",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3.1-8b",
    "qwen3-4b",
    "qwen3-8b",
];

/// Widths and counts in the order of [`ModelConfig`].
struct Shape {
    vocab: usize,
    d: usize,
    f: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    tied: bool,
    max_position: usize,
    eps: f32,
}

/// The shape called `name`, as in the `config.json` published with the base model; `None` if there is none.
pub fn preset(name: &str) -> Option<ModelConfig> {
    let shape = |vocab, d, f, layers, (heads, kv_heads)| Shape {
        vocab,
        d,
        f,
        layers,
        heads,
        kv_heads,
        tied: false,
        max_position: 131_072,
        eps: 1e-6,
    };
    let small = |shape: Shape, max_position| Shape { tied: true, max_position, ..shape };
    Some(match name {
        "tiny" => tiny(),
        "qwen2.5-0.5b" => qwen2(small(shape(151_936, 896, 4864, 24, (14, 2)), 32_768)),
        "qwen2.5-1.5b" => qwen2(small(shape(151_936, 1536, 8960, 28, (12, 2)), 131_072)),
        "qwen2.5-3b" => qwen2(small(shape(151_936, 2048, 11_008, 36, (16, 2)), 32_768)),
        "qwen2.5-7b" => qwen2(shape(152_064, 3584, 18_944, 28, (28, 4))),
        "qwen2.5-14b" => qwen2(Shape { eps: 1e-5, ..shape(152_064, 5120, 13_824, 48, (40, 8)) }),
        "qwen2.5-32b" => qwen2(Shape { eps: 1e-5, ..shape(152_064, 5120, 27_648, 64, (40, 8)) }),
        "llama-3.1-8b" => llama3(Shape { eps: 1e-5, ..shape(128_256, 4096, 14_336, 32, (32, 8)) }),
        "qwen3-4b" => qwen3(small(shape(151_936, 2560, 9728, 36, (32, 8)), 40_960)),
        "qwen3-8b" => qwen3(Shape { max_position: 40_960, ..shape(151_936, 4096, 12_288, 36, (32, 8)) }),
        _ => return None,
    })
}

fn base(family: Family, shape: Shape) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: shape.vocab,
        hidden_size: shape.d,
        intermediate_size: shape.f,
        num_layers: shape.layers,
        num_heads: shape.heads,
        num_kv_heads: shape.kv_heads,
        head_dim: shape.d / shape.heads,
        norm_eps: shape.eps,
        qkv_bias: false,
        qk_norm: false,
        tied_embeddings: shape.tied,
        max_position_embeddings: shape.max_position,
        rope: RopeConfig { theta: 1e6, scaling: RopeScaling::None },
        initializer_range: 0.02,
    }
}

fn qwen2(shape: Shape) -> ModelConfig {
    ModelConfig { qkv_bias: true, ..base(Family::Qwen2, shape) }
}

fn qwen3(shape: Shape) -> ModelConfig {
    ModelConfig { qk_norm: true, head_dim: 128, ..base(Family::Qwen3, shape) }
}

fn llama3(shape: Shape) -> ModelConfig {
    let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192 };
    ModelConfig { rope: RopeConfig { theta: 5e5, scaling }, ..base(Family::Llama, shape) }
}

/// Bytes as vocabulary; a step at 32K tokens takes some ten seconds on two cores. Random weights favour no length, so the
/// length it claims to support is a million.
fn tiny() -> ModelConfig {
    let shape =
        Shape { vocab: 256, d: 64, f: 192, layers: 2, heads: 2, kv_heads: 1, tied: true, max_position: 1 << 20, eps: 1e-6 };
    ModelConfig { qk_norm: true, ..base(Family::Qwen3, shape) }
}
