//! One pass over a sequence's chunks, without a gradient: for losses, or for the next token.

use super::{Pass, forward};
use crate::engine::{Chunk, Engine};
use crate::kv::Mode;
use crate::model::head::HeadChunk;
use oomb_device::{Backend, Tensor};

/// Leaves the losses of one loaded sequence on the device; one pass, no gradient.
pub fn evaluate<B: Backend>(engine: &mut Engine<B>, chunks: &[Chunk]) {
    let layers = engine.config.num_layers;
    engine.store.begin(chunks.iter().flat_map(|chunk| (0..layers).map(|layer| chunk.access(layer, Mode::Forward))).collect());
    for chunk in chunks {
        forward(engine, chunk, Pass::FillAndFinish);
        let hidden = engine.acts(chunk, layers - 1).output;
        let mut head = HeadChunk { losses: engine.losses(chunk), hidden: &hidden, labels: engine.labels(chunk) };
        engine.head.forward(&engine.device, &engine.config, &engine.weights, &mut head);
    }
    engine.store.clear();
}

/// Leaves the logits `[1, V]` after the last token of `chunks`, which begin a sequence or go on with the one whose pages the
/// store holds.
pub fn predict<B: Backend>(engine: &mut Engine<B>, chunks: &[Chunk]) -> Option<Tensor<B>> {
    let (last, earlier) = chunks.split_last()?;
    let layers = engine.config.num_layers;
    let accesses = |chunk: &Chunk, layers| (0..layers).map(|layer| chunk.access(layer, Mode::Forward)).collect::<Vec<_>>();
    let fill = earlier.iter().flat_map(|chunk| accesses(chunk, layers - 1));
    let accesses = fill.chain(accesses(last, layers)).collect();
    if chunks[0].tokens.start == 0 {
        engine.store.begin(accesses)
    } else {
        engine.store.announce(accesses)
    }
    for chunk in earlier {
        forward(engine, chunk, Pass::Fill);
    }
    forward(engine, last, Pass::FillAndFinish);
    let hidden = engine.acts(last, layers - 1).output;
    let hidden = hidden.narrow(last.tokens.len() - 1..last.tokens.len());
    Some(engine.head.predict(&engine.device, &engine.config, &engine.weights, &hidden))
}
