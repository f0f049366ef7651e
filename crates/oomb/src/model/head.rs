//! The ends of the model: final norm, head and loss in tiles of tokens, so that a chunk's logits never exist at once.

use super::activations::Gradients;
use super::config::ModelConfig;
use super::weights::{Grads, Weights};
use oomb_device::ops::linear::{Epilogue, Write};
use oomb_device::{Backend, Tensor};

/// Buffers of one tile.
pub struct HeadBuffers<B: Backend> {
    /// `[tile, D]`.
    pub normed: Tensor<B>,
    /// `[tile]` f32.
    pub rstd: Tensor<B>,
    /// `[tile, V]`; their own gradient in the backward.
    pub logits: Tensor<B>,
}

/// What the head reads and writes for one chunk of t tokens.
pub struct HeadChunk<'a, B: Backend> {
    /// `[t]` f32, overwritten: the loss of each token.
    pub losses: Tensor<B>,
    /// `[t, D]`: the last layer's output.
    pub hidden: &'a Tensor<B>,
    /// `[t]` u32.
    pub labels: Tensor<B>,
}

impl<B: Backend> HeadBuffers<B> {
    /// The loss of each token.
    pub fn forward(&self, device: &B, config: &ModelConfig, weights: &Weights<B>, chunk: &mut HeadChunk<'_, B>) {
        self.tiles(chunk, |tile, losses, hidden, labels| {
            tile.logits_of(device, config, weights, hidden);
            device.cross_entropy_forward(losses, &tile.logits, labels);
        });
    }

    /// The loss of each token, and its gradient times `weight`: `d.d_hidden` overwritten, `grads` accumulated
    /// where they are not frozen.
    pub fn backward(
        &self,
        device: &B,
        (config, weights): (&ModelConfig, &Weights<B>),
        grads: &mut Grads<B>,
        chunk: &mut HeadChunk<'_, B>,
        (d, weight): (&mut Gradients<B>, f32),
    ) {
        device.fill(&mut d.d_hidden, 0.0);
        let mut row = 0;
        self.tiles(chunk, |tile, losses, hidden, labels| {
            let rows = row..row + hidden.rows();
            row = rows.end;
            tile.logits_of(device, config, weights, hidden);
            device.cross_entropy_backward(losses, &mut tile.logits, labels, weight);
            if let Some(head) = &mut grads.head {
                head.add(device, &tile.logits, &tile.normed);
            }
            let (mut d_hidden, mut d_normed) = (d.d_hidden.narrow(rows.clone()), d.d_normed.narrow(rows));
            device.linear_backward_input(&mut d_normed, &tile.logits, &weights.head, Write::Overwrite);
            let norm = grads.final_norm.as_mut();
            device.rmsnorm_backward(&mut d_hidden, norm, &d_normed, hidden, &tile.rstd, &weights.final_norm);
        });
    }

    /// The logits of one token, `hidden` `[1, D]`, as `[1, V]` in this buffer.
    pub fn predict(&self, device: &B, config: &ModelConfig, weights: &Weights<B>, hidden: &Tensor<B>) -> Tensor<B> {
        let cut = |buffer: &Tensor<B>| buffer.narrow(0..1);
        let mut row = Self { normed: cut(&self.normed), rstd: cut(&self.rstd), logits: cut(&self.logits) };
        row.logits_of(device, config, weights, hidden);
        row.logits
    }

    fn logits_of(&mut self, device: &B, config: &ModelConfig, weights: &Weights<B>, hidden: &Tensor<B>) {
        device.rmsnorm_forward(&mut self.normed, &mut self.rstd, hidden, &weights.final_norm, config.norm_eps);
        device.linear_forward(&mut self.logits, &self.normed, &weights.head, Epilogue::None);
    }

    /// Calls `each` with buffers cut to every tile of the chunk in turn: (buffers, losses, hidden, labels).
    fn tiles(&self, chunk: &mut HeadChunk<'_, B>, mut each: impl FnMut(&mut Self, &mut Tensor<B>, &Tensor<B>, &Tensor<B>)) {
        let (tokens, tile) = (chunk.hidden.rows(), self.logits.rows());
        for start in (0..tokens).step_by(tile) {
            let rows = start..tokens.min(start + tile);
            let cut = |buffer: &Tensor<B>| buffer.narrow(0..rows.len());
            let mut buffers = Self { normed: cut(&self.normed), rstd: cut(&self.rstd), logits: cut(&self.logits) };
            let of = |chunk: &Tensor<B>| chunk.narrow(rows.clone());
            each(&mut buffers, &mut of(&chunk.losses), &of(chunk.hidden), &of(&chunk.labels));
        }
    }
}
