//! The transformer: configuration, weights, and one layer's forward and backward. It must not know where pages are
//! stored, nor in which order chunks are visited.

pub mod activations;
pub mod config;
pub mod families;
pub mod head;
pub mod layer;
pub mod lora;
pub mod params;
pub mod presets;
pub mod projection;
pub mod rope;
pub mod weights;
