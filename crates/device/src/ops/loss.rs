//! Cross entropy over a tile of tokens: full logits never exist.

use crate::{Device, Tensor};

/// Label of a position that has no loss.
pub const IGNORE: u32 = u32::MAX;

/// Softmax cross entropy, one loss per token.
pub trait LossOps: Device {
    /// `loss[t] = log Σ_v exp logits[t, v] - logits[t, labels[t]]`, 0 where the label is [`IGNORE`]. `loss` `[t]` f32
    /// overwritten, `logits` `[t, V]` activation, `labels` `[t]` u32 below V or [`IGNORE`].
    fn cross_entropy_forward(&self, loss: &mut Tensor<Self>, logits: &Tensor<Self>, labels: &Tensor<Self>);

    /// The same loss, and `logits` **overwritten** by their gradient `weight · (softmax(logits) - onehot(label))`, zero
    /// in rows without a label. `weight` is 1 / (valid labels of the optimizer step): the only place where a loss is
    /// normalised.
    fn cross_entropy_backward(&self, loss: &mut Tensor<Self>, logits: &mut Tensor<Self>, labels: &Tensor<Self>, weight: f32);
}
