//! What chunks keep in host memory between the passes: it goes out of the buffers of set 0 while later layers are computed, and
//! comes back into them when the chunk before has done with a layer. It must not know the order of chunks.
//!
//! Events in both directions: a copy out waits for compute, and compute for it before it writes those buffers again; a copy in
//! waits for compute's last use of the buffers and for the copies out, and compute for it before it reads.

use super::{KEPT_ATTENDED, KEPT_INPUT, KEPT_LSE, KEPT_OUTPUT, Kept, LayerActivations, Place, Stored, host_shapes};
use crate::model::config::ModelConfig;
use oomb_device::{Backend, Stream, Tensor};

/// The host buffers and the copies under way. Buffers of a layer move together; what is numbered after the last layer is the
/// last one's output.
pub struct HostActivations<B: Backend> {
    num_layers: usize,
    buffers: Vec<(&'static str, B::HostBuffer)>,
    /// By layer: copies out that read the buffers of set 0.
    saving: Vec<Option<B::Event>>,
    /// By layer: copies in, until compute has been told to wait for them.
    loading: Vec<Option<B::Event>>,
    /// The last copy out.
    saved: Option<B::Event>,
    /// Bytes that went out and came in so far.
    pub moved: [u64; 2],
}

impl<B: Backend> HostActivations<B> {
    /// Takes the buffers from `take`, which is asked for each name of [`host_shapes`] in order.
    pub fn new(config: &ModelConfig, kept: Kept, mut take: impl FnMut(&'static str) -> B::HostBuffer) -> Self {
        let num_layers = config.num_layers;
        let names = host_shapes(config, 1, kept).into_iter().map(|(name, ..)| name);
        let none = || (0..=num_layers).map(|_| None).collect();
        let buffers = names.map(|name| (name, take(name))).collect();
        Self { num_layers, buffers, saving: none(), loading: none(), saved: None, moved: [0; 2] }
    }

    /// What a chunk at `place` keeps of a layer here: host buffer, offset in bytes, and where it is in work.
    fn items<'a>(&self, place: Place, layer: usize, acts: &'a LayerActivations<B>) -> Vec<(B::HostBuffer, u64, &'a Tensor<B>)> {
        let item = |name: &str, index: usize, tensor: &'a Tensor<B>| {
            let found = self.buffers.iter().find(|(known, _)| *known == name);
            let (_, buffer) = found.unwrap_or_else(|| panic!("no host buffer {name}"));
            (buffer.clone(), index as u64 * tensor.bytes(), tensor)
        };
        let in_layer = |index: usize| index * self.num_layers + layer;
        let mut items = Vec::new();
        match place.inputs {
            Some(Stored::Host(index)) if layer == self.num_layers => items.push(item(KEPT_OUTPUT, index, &acts.output)),
            Some(Stored::Host(index)) => items.push(item(KEPT_INPUT, in_layer(index), &acts.input)),
            _ => {}
        }
        if let Some(Stored::Host(index)) = place.attention.filter(|_| layer < self.num_layers) {
            items.push(item(KEPT_ATTENDED, in_layer(index), &acts.attended));
            items.push(item(KEPT_LSE, in_layer(index), &acts.lse));
        }
        items
    }

    /// Starts the copies out of what compute has enqueued of a whole chunk's layer, as far as `place` keeps it here.
    pub fn save(&mut self, device: &B, place: Place, layer: usize, acts: &LayerActivations<B>) {
        let items = self.items(place, layer, acts);
        if items.is_empty() {
            return;
        }
        device.wait(Stream::Out, &device.record(Stream::Compute));
        for (host, offset, tensor) in items {
            device.copy_out(&host, offset, tensor.buffer(), tensor.offset_bytes(), tensor.bytes());
            self.moved[0] += tensor.bytes();
        }
        let event = device.record(Stream::Out);
        self.saving[layer] = Some(event.clone());
        self.saved = Some(event);
    }

    /// Makes compute wait before it overwrites what set 0 holds of a layer.
    pub fn reuse(&mut self, device: &B, layer: usize) {
        if let Some(event) = self.saving[layer].take() {
            device.wait(Stream::Compute, &event);
        }
    }

    /// Starts the copies in for a layer of the chunk at `place`, whose buffers compute needs no longer after what it has enqueued.
    pub fn fetch(&mut self, device: &B, place: Place, layer: usize, acts: &LayerActivations<B>) {
        let items = self.items(place, layer, acts);
        if items.is_empty() {
            return;
        }
        device.wait(Stream::In, &device.record(Stream::Compute));
        for event in self.saving[layer].take().iter().chain(&self.saved) {
            device.wait(Stream::In, event);
        }
        for (host, offset, tensor) in items {
            device.copy_in(tensor.buffer(), tensor.offset_bytes(), &host, offset, tensor.bytes());
            self.moved[1] += tensor.bytes();
        }
        self.loading[layer] = Some(device.record(Stream::In));
    }

    /// Makes compute wait until what was fetched of a layer is there.
    pub fn ready(&mut self, device: &B, layer: usize) {
        if let Some(event) = self.loading[layer].take() {
            device.wait(Stream::Compute, &event);
        }
    }
}
