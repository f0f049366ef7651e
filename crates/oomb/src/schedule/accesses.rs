//! Which attention calls a training step makes, in order: what the page store is told ahead of time. It must agree with the schedule
//! and decides nothing.

use crate::engine::{Chunk, Engine};
use crate::kv::{Access, Mode};
use crate::model::activations::Keep;
use oomb_device::Backend;

/// Whether pass 2 finds what pass 1 computed of a chunk.
pub(super) fn is_kept(chunk: &Chunk) -> bool {
    chunk.place.set > 0
}

/// Every attention call of [`super::forward_backward`], in the order in which it makes them.
pub(super) fn training_accesses<B: Backend>(engine: &Engine<B>, chunks: &[Chunk], keep: Keep) -> Vec<Access> {
    let (last, layers) = (chunks.len() - 1, engine.config.num_layers);
    let kept = |chunk: &Chunk, layer| engine.activations.keeps_attention(chunk.place, layer);
    let mut accesses = Vec::new();
    for chunk in &chunks[..last] {
        let filled = if is_kept(chunk) { layers } else { layers - 1 };
        accesses.extend((0..filled).map(|layer| chunk.access(layer, Mode::Forward)));
    }
    for chunk in chunks.iter().rev() {
        let again = (0..layers).filter(|&layer| !is_kept(chunk) && !kept(chunk, layer));
        accesses.extend(again.map(|layer| chunk.access(layer, Mode::Forward)));
        for layer in (0..layers).rev() {
            let again = keep == Keep::Inputs && !kept(chunk, layer);
            accesses.extend(again.then(|| chunk.access(layer, Mode::Forward)));
            accesses.push(chunk.access(layer, Mode::Backward));
        }
    }
    accesses
}
