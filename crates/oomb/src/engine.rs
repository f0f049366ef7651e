//! A model with all memory of a run: allocated once, exactly as planned. It must not know the order of the passes, nor
//! where sequences come from.

pub mod optimizer;

use crate::data::Sequence;
use crate::kv::select::{Selection, visible_pages};
use crate::kv::{Access, KvMemory, Mode, Store, Traffic};
use crate::model::activations::host::HostActivations;
use crate::model::activations::{Activations, Keep, LayerActivations, Place};
use crate::model::config::ModelConfig;
use crate::model::head::HeadBuffers;
use crate::model::lora::trained_specs;
use crate::model::rope;
use crate::model::weights::{Grads, Params, Weights, slab_layout};
use crate::plan::optimizer::HOST;
use crate::plan::{Machine, Plan, Tier};
use oomb_device::ops::loss::IGNORE;
use oomb_device::{Backend, DType, HostData, Result, Tensor};
use optimizer::OptimizerState;
use std::ops::Range;

/// A run of a sequence's tokens that is processed at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Positions in the sequence.
    pub tokens: Range<usize>,
    /// Pages that hold its own k, v.
    pub own_pages: Range<usize>,
    /// Row of its first page where it begins: 0 but where it goes on with a page.
    pub first_row: usize,
    /// Pages that it sees, its own included.
    pub visible_pages: Range<usize>,
    /// Where its activations are.
    pub place: Place,
    /// Which of the step's sequences it belongs to.
    sequence: usize,
}

impl Chunk {
    /// Its attention call in `layer`.
    pub fn access(&self, layer: usize, mode: Mode) -> Access {
        Access { layer, pages: self.visible_pages.clone(), mode }
    }

    /// Position of its first token.
    pub fn start(&self) -> u32 {
        u32::try_from(self.tokens.start).expect("positions fit 32 bits")
    }
}

/// What a run computes with.
pub struct Engine<B: Backend> {
    /// The machine.
    pub device: B,
    /// The model's shape.
    pub config: ModelConfig,
    /// The model.
    pub weights: Weights<B>,
    /// The adapters' parameters, where there are adapters; the weights are then frozen.
    pub adapter: Option<Params<B>>,
    /// Gradients in f32 of what is trained; absent in an evaluation.
    pub grads: Option<Grads<B>>,
    /// `[1]` f64 scratch of the global norm; absent in an evaluation.
    pub norm_squared: Option<Tensor<B>>,
    /// Absent where nothing is updated.
    pub optimizer: Option<OptimizerState<B>>,
    /// One chunk's buffers.
    pub activations: Activations<B>,
    /// What chunks keep in host memory from pass 1 to pass 2.
    pub host: HostActivations<B>,
    /// One loss tile's buffers.
    pub head: HeadBuffers<B>,
    /// Keys, values and their gradients.
    pub store: Store<B>,
    /// The plan that all of this was allocated by.
    pub plan: Plan,
    selection: Selection,
    inputs: Inputs<B>,
    rope_scale: f32,
}

/// The sequence in work, `[S]` u32 each, and what is derived from it.
struct Inputs<B: Backend> {
    ids: Tensor<B>,
    labels: Tensor<B>,
    positions: Tensor<B>,
    first: Tensor<B>,
    /// `[sequences, S]` f32.
    losses: Tensor<B>,
    /// `[Dh/2]` f64.
    inv_freq: Tensor<B>,
}

/// What `device` is, for a plan; `host_memory` in bytes.
pub fn machine<B: Backend>(device: &B, host_memory: u64) -> Machine {
    let bytes = |dtype| device.element_bytes(dtype) as u64;
    let (_, free) = device.memory();
    let shared = device.name() == "cpu";
    Machine {
        device: device.name(),
        compute_dtype: device.compute_dtype(),
        element_bytes: [DType::Bf16, DType::F32, DType::F64, DType::U32].map(bytes),
        device_memory: if shared { host_memory } else { free + device.workspace_bytes() },
        host_memory,
        shared,
        workspace_bytes: device.workspace_bytes(),
    }
}

impl<B: Backend> Engine<B> {
    /// Allocates everything the plan lists; weights and state are undefined until they are loaded or made.
    pub fn new(device: &B, plan: Plan, selection: Selection) -> Result<Self> {
        let config = plan.request.model.clone();
        let mut arena = Arena::allocate(device, &plan)?;
        let lora = plan.request.lora.as_ref();
        let trained = trained_specs(&config, lora);
        let adapter = arena.take("adapter").map(|slab| Params::new(trained.clone(), slab));
        let slab = arena.take("weights").expect("every plan has weights");
        let weights = Weights::new(&config, slab, lora.zip(adapter.as_ref()));
        let grads = arena.take("gradients").map(|slab| Grads::new(&config, slab, lora));
        let optimizer = plan.optimizer.map(|state| {
            let (elements, _) = slab_layout(&trained);
            let host = arena.take_host(HOST);
            OptimizerState::new(state, elements, host, |name| arena.take(name))
        });
        let mut must = |name: &str| arena.take(name).unwrap_or_else(|| panic!("the plan has no buffer {name}"));
        let rank = lora.map(|lora| lora.rank);
        let activations = Activations::new(&config, plan.keep, rank, plan.kept, |name| must(&format!("activations.{name}")));
        let host = HostActivations::new(&config, plan.kept, |name| {
            let name = format!("activations.{name}.host");
            arena.take_host(&name).unwrap_or_else(|| panic!("the plan has no host buffer {name}"))
        });
        let mut must = |name: &str| arena.take(name).unwrap_or_else(|| panic!("the plan has no buffer {name}"));
        let head = HeadBuffers { normed: must("head.normed"), rstd: must("head.rstd"), logits: must("head.logits") };
        let inputs = Inputs {
            ids: must("sequence.ids"),
            labels: must("sequence.labels"),
            positions: must("sequence.positions"),
            first: must("sequence.first"),
            losses: must("sequence.losses"),
            inv_freq: must("sequence.inv_freq"),
        };
        let norm_squared = arena.take("gradient_norm");
        let kv = arena.pages("kv.pages").expect("every plan has pages");
        let store = Store::new(device, &plan.layout, kv, arena.pages("kv.gradients"));
        assert!(arena.tensors.is_empty() && arena.host.is_empty(), "planned, but not used: {arena:?}");
        Ok(Self {
            device: device.clone(),
            config,
            weights,
            adapter,
            grads,
            norm_squared,
            optimizer,
            activations,
            host,
            head,
            store,
            plan,
            selection,
            inputs,
            rope_scale: 1.0,
        })
    }

    /// What training changes: the adapters where there are any, else the weights.
    pub fn trained(&self) -> &Params<B> {
        self.adapter.as_ref().unwrap_or(&self.weights)
    }

    /// What chunks keep; `None` in an evaluation.
    pub fn keep(&self) -> Option<Keep> {
        self.plan.keep
    }

    /// Brings a sequence to the device as number `index` of its step and cuts it into chunks.
    ///
    /// # Panics
    /// If it is longer than planned, or holds a token outside the vocabulary.
    pub fn load(&mut self, sequence: &Sequence, index: usize) -> Vec<Chunk> {
        let first = self.upload(sequence, 0);
        let tokens = sequence.ids.len();
        let size = self.plan.request.chunk_tokens;
        let place = |start: usize| self.plan.place(start / size, tokens.div_ceil(size));
        let chunk = |start: usize| self.chunk(start..tokens.min(start + size), &first[start..], index, place(start));
        (0..tokens).step_by(size).map(chunk).collect()
    }

    /// Brings one more token to the device, at `position` of the sequence that is loaded: a chunk of its own.
    ///
    /// # Panics
    /// If the sequence would be longer than planned, or the token is outside the vocabulary.
    pub fn append(&mut self, id: u32, position: usize) -> Chunk {
        let at = u32::try_from(position).expect("positions fit 32 bits");
        let token = Sequence { ids: vec![id], labels: vec![IGNORE], positions: vec![at], first: vec![0] };
        let first = self.upload(&token, position);
        self.chunk(position..position + 1, &first, 0, Place::default())
    }

    /// Uploads tokens to `start` and after, and the frequencies for a sequence that ends with them; returns the tokens' first
    /// visible positions.
    fn upload(&mut self, sequence: &Sequence, start: usize) -> Vec<u32> {
        let rows = start..start + sequence.ids.len();
        assert!(rows.end <= self.inputs.ids.len(), "{} tokens planned for {}", rows.end, self.inputs.ids.len());
        let mut first = sequence.first.clone();
        self.selection.narrow(u32::try_from(start).expect("positions fit 32 bits"), &mut first);
        let arrays = [
            (&self.inputs.ids, &sequence.ids),
            (&self.inputs.labels, &sequence.labels),
            (&self.inputs.positions, &sequence.positions),
            (&self.inputs.first, &first),
        ];
        for (tensor, values) in arrays {
            self.device.upload(&mut tensor.narrow(rows.clone()), HostData::U32(values));
        }
        let (inv_freq, scale) = rope::inv_freq(&self.config, sequence.longest());
        self.device.upload(&mut self.inputs.inv_freq, HostData::F64(&inv_freq));
        self.rope_scale = scale;
        first
    }

    /// A chunk whose first token sees `first[0]` and after.
    fn chunk(&self, tokens: Range<usize>, first: &[u32], sequence: usize, place: Place) -> Chunk {
        let page = self.plan.request.page_tokens;
        let visible_pages = visible_pages(first[0], tokens.end, page);
        let own_pages = tokens.start / page..tokens.end.div_ceil(page);
        Chunk { own_pages, first_row: tokens.start % page, visible_pages, tokens, place, sequence }
    }

    /// A chunk's buffers in `layer`.
    pub fn acts(&self, chunk: &Chunk, layer: usize) -> LayerActivations<B> {
        self.activations.layer(chunk.place, layer, chunk.tokens.len())
    }

    /// Starts the copies of what the chunk's place keeps of `layer` in host memory; of its output after the last layer.
    pub fn save(&mut self, chunk: &Chunk, layer: usize) {
        let acts = self.acts(chunk, layer.min(self.config.num_layers - 1));
        self.host.save(&self.device, chunk.place, layer, &acts);
    }

    /// After `chunk`'s last use of `layer`, or of its output after the last: brings what the next chunk to be computed in the same
    /// buffers keeps of it in host memory, where `earlier` are those before.
    pub fn fetch(&mut self, earlier: &[Chunk], chunk: &Chunk, layer: usize) {
        let next = earlier.iter().rev().find(|next| next.place.set == chunk.place.set);
        let Some(next) = next else { return };
        let acts = self.acts(next, layer.min(self.config.num_layers - 1));
        self.host.fetch(&self.device, next.place, layer, &acts);
    }

    /// What moved between host and device so far: pages, activations, optimizer state.
    pub fn traffic(&self) -> Traffic {
        let state = self.optimizer.as_ref().map_or_else(Traffic::default, |state| state.traffic);
        let [out_bytes, in_bytes] = self.host.moved;
        self.store.traffic() + state + Traffic { in_bytes, out_bytes, ..Traffic::default() }
    }

    /// A chunk's angles into the rotation table, which all chunks share.
    pub fn rotate(&mut self, chunk: &Chunk) {
        let mut acts = self.acts(chunk, 0);
        let positions = self.inputs.positions.narrow(chunk.tokens.clone());
        self.device.rope_table(&mut acts.rope_table, &positions, &self.inputs.inv_freq, self.rope_scale);
    }

    /// Starts a chunk's forward: its embeddings into the first layer's input.
    pub fn embed(&mut self, chunk: &Chunk) {
        self.host.reuse(&self.device, 0);
        let mut acts = self.acts(chunk, 0);
        self.device.embed_forward(&mut acts.input, &self.weights.embed, &self.ids(chunk));
    }

    /// `[t]` u32: token ids.
    pub fn ids(&self, chunk: &Chunk) -> Tensor<B> {
        self.inputs.ids.narrow(chunk.tokens.clone())
    }

    /// `[t]` u32: labels.
    pub fn labels(&self, chunk: &Chunk) -> Tensor<B> {
        self.inputs.labels.narrow(chunk.tokens.clone())
    }

    /// `[t]` u32: first visible positions, narrowed by the selection.
    pub fn first(&self, chunk: &Chunk) -> Tensor<B> {
        self.inputs.first.narrow(chunk.tokens.clone())
    }

    /// `[t]` f32: losses.
    pub fn losses(&self, chunk: &Chunk) -> Tensor<B> {
        self.inputs.losses.index(chunk.sequence).narrow(chunk.tokens.clone())
    }

    /// Waits for the losses of the first `tokens` tokens of sequence `index` of the step.
    pub fn download_losses(&self, index: usize, tokens: usize) -> Result<Vec<f64>> {
        self.device.download_f64(&self.inputs.losses.index(index).narrow(0..tokens))
    }

    /// Factor on q·k.
    pub fn attention_scale(&self) -> f32 {
        1.0 / (self.config.head_dim as f32).sqrt()
    }
}

/// The plan's buffers, allocated, until each has found its owner.
struct Arena<B: Backend> {
    tensors: Vec<(String, Tensor<B>)>,
    host: Vec<(String, B::HostBuffer)>,
}

impl<B: Backend> std::fmt::Debug for Arena<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.tensors.iter().map(|(name, _)| name).chain(self.host.iter().map(|(name, _)| name));
        f.debug_list().entries(names).finish()
    }
}

impl<B: Backend> Arena<B> {
    fn allocate(device: &B, plan: &Plan) -> Result<Self> {
        let mut arena = Self { tensors: Vec::new(), host: Vec::new() };
        for buffer in &plan.buffers {
            let name = buffer.name.clone();
            match buffer.tier {
                Tier::Device => {
                    let memory = device.alloc(buffer.bytes)?;
                    let element_bytes = device.element_bytes(buffer.dtype);
                    arena.tensors.push((name, Tensor::new(memory, 0, buffer.dtype, element_bytes, &buffer.shape)));
                }
                Tier::Host => arena.host.push((name, device.alloc_pinned(buffer.bytes)?)),
            }
        }
        Ok(arena)
    }

    fn take(&mut self, name: &str) -> Option<Tensor<B>> {
        let index = self.tensors.iter().position(|(known, _)| known == name)?;
        Some(self.tensors.swap_remove(index).1)
    }

    fn pages(&mut self, name: &str) -> Option<KvMemory<B>> {
        let slab = self.take(name)?;
        let host = self.take_host(&format!("{name}.host"));
        Some(KvMemory { slab, host })
    }

    fn take_host(&mut self, name: &str) -> Option<B::HostBuffer> {
        let index = self.host.iter().position(|(known, _)| known == name)?;
        Some(self.host.swap_remove(index).1)
    }
}
