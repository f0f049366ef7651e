//! Token embedding.

use crate::{Device, Tensor};

/// Rows of a table, and their gradient.
pub trait EmbedOps: Device {
    /// `x[t] = table[ids[t]]`: `x` `[T, D]` overwritten, `table` `[V, D]`, `ids` `[T]` u32, each below V.
    fn embed_forward(&self, x: &mut Tensor<Self>, table: &Tensor<Self>, ids: &Tensor<Self>);

    /// `dtable[ids[t]] += dx[t]`: **accumulates** into `[V, D]` f32, deterministically (rows of one id in order of t).
    fn embed_backward(&self, dtable: &mut Tensor<Self>, dx: &Tensor<Self>, ids: &Tensor<Self>);
}
