//! What of a chunk is kept and what is computed again, and the attention calls that follow from it, in order: what the page store is
//! told ahead of time. It must agree with the schedule.

use crate::engine::{Chunk, Engine};
use crate::kv::{Access, Mode};
use crate::model::activations::Keep;
use oomb_device::Backend;

/// Whether pass 2 needs no forward of a chunk: it finds what pass 1 computed.
pub(super) fn is_kept(chunk: &Chunk) -> bool {
    chunk.place.set > 0 || chunk.place.inputs.is_some()
}

/// Whether pass 2 finds the chunk's attention outputs.
pub(super) fn keeps_attention(chunk: &Chunk) -> bool {
    chunk.place.attention.is_some()
}

/// What the chunk's backward finds of each layer; the rest it computes again.
pub(super) fn found(chunk: &Chunk, keep: Keep) -> Keep {
    match chunk.place.attention {
        // Of such a chunk no more is there; of another whose attention was kept, no less.
        Some(_) if chunk.place.inputs.is_some() => Keep::Attention,
        Some(_) => keep.max(Keep::Attention),
        None => keep,
    }
}

/// Every attention call of [`super::forward_backward`], in the order in which it makes them.
pub(super) fn training_accesses<B: Backend>(engine: &Engine<B>, chunks: &[Chunk], keep: Keep) -> Vec<Access> {
    let (last, layers) = (chunks.len() - 1, engine.config.num_layers);
    let mut accesses = Vec::new();
    for chunk in &chunks[..last] {
        let filled = if is_kept(chunk) || keeps_attention(chunk) { layers } else { layers - 1 };
        accesses.extend((0..filled).map(|layer| chunk.access(layer, Mode::Forward)));
    }
    for chunk in chunks.iter().rev() {
        let again = (0..layers).filter(|_| !is_kept(chunk) && !keeps_attention(chunk));
        accesses.extend(again.map(|layer| chunk.access(layer, Mode::Forward)));
        for layer in (0..layers).rev() {
            let again = found(chunk, keep) < Keep::Attention;
            accesses.extend(again.then(|| chunk.access(layer, Mode::Forward)));
            accesses.push(chunk.access(layer, Mode::Backward));
        }
    }
    accesses
}
