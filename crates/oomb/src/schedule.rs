//! The two passes over a sequence's chunks: the paper's algorithm, and nothing else. It must not know how tensors are
//! computed (`model`) nor where pages are (`kv`); it decides what happens in which order.

mod accesses;
mod inference;

pub use inference::{evaluate, predict};

use crate::engine::{Chunk, Engine};
use crate::model::activations::Keep;
use crate::model::head::HeadChunk;
use crate::model::layer;
use accesses::{found, is_kept, keeps_attention, training_accesses};
use oomb_device::ops::attention::{Mask, PageRef, Pages};
use oomb_device::{Backend, Tensor};

/// What a sequence's loss is multiplied by, and the randomness of its rounding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contribution {
    /// 1 / (valid labels of the optimizer step): the only place where the loss is normalised.
    pub weight: f32,
    /// Differs by step and sequence; only bf16 gradient pages use it.
    pub seed: u64,
}

/// Adds the gradient of one loaded sequence to the engine's gradients and leaves its losses on the device. Enqueues
/// everything and waits for nothing.
pub fn forward_backward<B: Backend>(engine: &mut Engine<B>, chunks: &[Chunk], contribution: Contribution) {
    let (Some((last, earlier)), Some(keep)) = (chunks.split_last(), engine.keep()) else { return };
    engine.store.begin(training_accesses(engine, chunks, keep));

    // Pass 1, in order. The last chunk needs none: pass 2 begins with it. What memory can hold of the ones before stays.
    for chunk in earlier {
        forward(engine, chunk, if is_kept(chunk) { Pass::FillAndFinish } else { Pass::Fill });
    }
    // Pass 2, in reverse.
    for (index, chunk) in chunks.iter().enumerate().rev() {
        if is_kept(chunk) {
            engine.rotate(chunk);
        } else {
            forward(engine, chunk, if chunk == last { Pass::FillAndFinish } else { Pass::Recompute });
        }
        head_backward(engine, chunk, contribution.weight);
        let layers = engine.config.num_layers;
        engine.fetch(&chunks[..index], chunk, layers);
        for layer in (0..layers).rev() {
            backward(engine, chunk, layer, found(chunk, keep), contribution.seed);
            engine.fetch(&chunks[..index], chunk, layer);
        }
        embed_backward(engine, chunk);
    }
}

/// What a chunk's forward is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Pass 1: fill the cache. No loss, no head, nothing of the last layer but its k, v.
    Fill,
    /// Pass 2 of the last chunk, a chunk that is kept, or no training: fill the cache and go on to the last layer's output.
    FillAndFinish,
    /// Pass 2: the pages hold this chunk's k, v already.
    Recompute,
}

fn forward<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk, pass: Pass) {
    let layers = engine.config.num_layers;
    engine.rotate(chunk);
    engine.embed(chunk);
    for layer in 0..layers {
        let ends = pass == Pass::Fill && layer == layers - 1;
        let attends = if keeps_attention(chunk) { pass != Pass::Recompute } else { !ends };
        project(engine, chunk, layer, pass != Pass::Recompute);
        if attends {
            attend(engine, chunk, layer);
        }
        if pass != Pass::Recompute {
            engine.save(chunk, layer);
        }
        if ends {
            return;
        }
        engine.host.reuse(&engine.device, layer + 1);
        let mut acts = engine.acts(chunk, layer);
        let weights = &engine.weights.layers[layer];
        layer::expand(&engine.device, &engine.config, weights, &mut acts);
        layer::contract(&engine.device, weights, &mut acts);
    }
    engine.save(chunk, layers);
}

fn project<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk, layer: usize, append: bool) {
    engine.host.ready(&engine.device, layer);
    let mut acts = engine.acts(chunk, layer);
    let new = append.then(|| engine.store.append(layer, chunk.own_pages.clone()));
    let pages = new.as_deref().map(|refs| Pages { slab: engine.store.slab(), refs });
    layer::project(&engine.device, &engine.config, &engine.weights.layers[layer], &mut acts, (pages, chunk.first_row));
    if append {
        engine.store.appended(layer, chunk.own_pages.clone());
    }
}

fn attend<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk, layer: usize) {
    let mut acts = engine.acts(chunk, layer);
    let first = engine.first(chunk);
    while let Some(group) = engine.store.next_group() {
        let kv = Pages { slab: engine.store.slab(), refs: &group.kv };
        layer::attend(&engine.device, &mut acts, kv, mask(engine, chunk, &first), group.part);
        engine.store.done(group);
    }
}

fn head_backward<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk, weight: f32) {
    let (tokens, layers) = (chunk.tokens.len(), engine.config.num_layers);
    engine.host.ready(&engine.device, layers);
    let hidden = engine.acts(chunk, layers - 1).output;
    let mut head = HeadChunk { losses: engine.losses(chunk), hidden: &hidden, labels: engine.labels(chunk) };
    let mut d = engine.activations.gradients(tokens);
    let Engine { device, config, weights, grads: Some(grads), .. } = engine else { return };
    engine.head.backward(device, (config, weights), grads, &mut head, (&mut d, weight));
}

fn backward<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk, layer: usize, keep: Keep, seed: u64) {
    let tokens = chunk.tokens.len();
    // What was not kept is computed again.
    if keep < Keep::All {
        project(engine, chunk, layer, false);
    }
    if keep < Keep::Attention {
        attend(engine, chunk, layer);
    }
    let mut acts = engine.acts(chunk, layer);
    let mut d = engine.activations.gradients(tokens);
    let first = engine.first(chunk);
    let Engine { device, config, weights, grads: Some(grads), .. } = &mut *engine else { return };
    let (weights, grads) = (&weights.layers[layer], &mut grads.layers[layer]);
    if keep < Keep::Mlp {
        layer::expand(device, config, weights, &mut acts);
    } else if keep < Keep::All {
        layer::normalise(device, config, weights, &mut acts);
    }
    layer::backward_mlp(device, config, weights, grads, &mut acts, &mut d);

    // dk, dv are added to every page the chunk attended to, old pages included.
    let seed = seed.wrapping_add((chunk.tokens.start as u64) << 16).wrapping_add(layer as u64);
    while let Some(group) = engine.store.next_group() {
        let kv = Pages { slab: engine.store.slab(), refs: &group.kv };
        let dkv = Pages { slab: engine.store.grad_slab(), refs: &group.grads };
        layer::backward_attend(&engine.device, &mut acts, &d, kv, dkv, mask(engine, chunk, &first), seed);
        engine.store.done(group);
    }

    // The chunk's own pages have now received every contribution.
    let own: Vec<PageRef> = engine.store.own_grads(layer, chunk.own_pages.clone());
    let Engine { device, config, weights, grads: Some(grads), store, .. } = &mut *engine else { return };
    let (weights, grads) = (&weights.layers[layer], &mut grads.layers[layer]);
    let pages = Pages { slab: store.grad_slab(), refs: &own };
    layer::backward_project(device, config, weights, grads, &mut acts, &mut d, pages);
    store.free(layer, chunk.own_pages.clone());
}

fn embed_backward<B: Backend>(engine: &mut Engine<B>, chunk: &Chunk) {
    let d = engine.activations.gradients(chunk.tokens.len());
    let ids = engine.ids(chunk);
    let Engine { device, grads: Some(grads), .. } = engine else { return };
    if let Some(embed) = &mut grads.embed {
        device.embed_backward(embed, &d.d_hidden, &ids);
    }
}

fn mask<'a, B: Backend>(engine: &Engine<B>, chunk: &Chunk, first: &'a Tensor<B>) -> Mask<'a, B> {
    Mask { first, start: chunk.start(), scale: engine.attention_scale() }
}
