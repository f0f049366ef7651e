//! The parameters as tensors: one slab, a view for each parameter. Weights, gradients and both moments share this form,
//! so that element `i` of one slab belongs to element `i` of the others.

use super::config::ModelConfig;
use super::lora::{Factor, LoraConfig, trained_specs};
use super::params::{LayerParam, ParamId, ParamSpec, param_specs};
use super::projection::{Adapter, MatrixGrad, Projection, ProjectionGrad};
use oomb_device::ops::linear::{Columns, Write};
use oomb_device::ops::moments::BLOCK_ELEMENTS;
use oomb_device::{Backend, Tensor};
use std::ops::{Deref, DerefMut, Range};

/// Parameters start at multiples of this many elements: vector accesses are aligned, and no scale of an optimizer's 8-bit moments
/// is shared by two parameters.
const ALIGNMENT: usize = BLOCK_ELEMENTS;

/// Elements of a slab that holds every parameter, and where each one lies.
pub fn slab_layout(specs: &[ParamSpec]) -> (usize, Vec<Range<usize>>) {
    let mut end = 0;
    let ranges = specs
        .iter()
        .map(|spec| {
            let start = end;
            end = (start + spec.len()).next_multiple_of(ALIGNMENT);
            start..start + spec.len()
        })
        .collect();
    (end, ranges)
}

/// Views of one slab `[elements]`, by parameter: the model's, its adapters', or what belongs to either of them.
pub struct Params<B: Backend> {
    /// All of it, padding included.
    pub slab: Tensor<B>,
    /// What lies where, in order.
    pub specs: Vec<ParamSpec>,
    /// One view for each of `specs`.
    pub views: Vec<Tensor<B>>,
    /// The elements of the slab that each view has.
    pub ranges: Vec<Range<usize>>,
}

impl<B: Backend> Params<B> {
    /// Views `slab`, which has the elements that [`slab_layout`] says.
    pub fn new(specs: Vec<ParamSpec>, slab: Tensor<B>) -> Self {
        let (elements, ranges) = slab_layout(&specs);
        assert_eq!(slab.len(), elements, "elements of a parameter slab");
        let view = |(spec, range): (&ParamSpec, &Range<usize>)| slab.narrow(range.clone()).reshape(&spec.shape);
        let views = specs.iter().zip(&ranges).map(view).collect();
        Self { slab, specs, views, ranges }
    }

    fn find(&self, id: ParamId) -> Option<Tensor<B>> {
        self.specs.iter().position(|spec| spec.id == id).map(|index| self.views[index].clone())
    }

    fn must(&self, id: ParamId) -> Tensor<B> {
        self.find(id).unwrap_or_else(|| panic!("every model has {id:?}"))
    }

    /// Adapters of the rows of `param` in `layer`.
    fn adapters(&self, config: &ModelConfig, lora: &LoraConfig, layer: usize, param: LayerParam) -> Vec<Adapter<B>> {
        let targets = lora.targets.iter().filter(|target| target.param() == param);
        let adapter = |&target| {
            let factor = |factor| self.must(ParamId::Layer(layer, LayerParam::Lora(target, factor)));
            let columns = Columns { range: target.rows(config), scale: lora.scale() };
            Adapter { a: factor(Factor::A), b: factor(Factor::B), columns }
        };
        targets.map(adapter).collect()
    }
}

/// The model's weights, with the names by which the model code knows them.
pub struct Weights<B: Backend> {
    params: Params<B>,
    /// `[V, D]`.
    pub embed: Tensor<B>,
    /// The layers' parameters.
    pub layers: Vec<LayerWeights<B>>,
    /// `[D]`.
    pub final_norm: Tensor<B>,
    /// `[V, D]`; the embedding itself where they are tied.
    pub head: Tensor<B>,
}

/// One layer's weights; shapes in [`LayerParam`].
#[expect(missing_docs, reason = "named and documented as the variants of LayerParam")]
pub struct LayerWeights<B: Backend> {
    pub attention_norm: Tensor<B>,
    pub qkv: Projection<B>,
    pub qkv_bias: Option<Tensor<B>>,
    pub q_norm: Option<Tensor<B>>,
    pub k_norm: Option<Tensor<B>>,
    pub output: Projection<B>,
    pub mlp_norm: Tensor<B>,
    pub gate_up: Projection<B>,
    pub down: Projection<B>,
}

impl<B: Backend> Deref for Weights<B> {
    type Target = Params<B>;
    fn deref(&self) -> &Params<B> {
        &self.params
    }
}

impl<B: Backend> DerefMut for Weights<B> {
    fn deref_mut(&mut self) -> &mut Params<B> {
        &mut self.params
    }
}

impl<B: Backend> Weights<B> {
    /// Views `slab`, and the adapters' parameters where there are adapters.
    pub fn new(config: &ModelConfig, slab: Tensor<B>, adapter: Option<(&LoraConfig, &Params<B>)>) -> Self {
        let params = Params::new(param_specs(config), slab);
        let layers = (0..config.num_layers)
            .map(|layer| {
                let must = |param| params.must(ParamId::Layer(layer, param));
                let find = |param| params.find(ParamId::Layer(layer, param));
                let projection = |param| {
                    let adapters = adapter.map(|(lora, adapter)| adapter.adapters(config, lora, layer, param));
                    Projection { weight: must(param), adapters: adapters.unwrap_or_default() }
                };
                LayerWeights {
                    attention_norm: must(LayerParam::AttentionNorm),
                    qkv: projection(LayerParam::Qkv),
                    qkv_bias: find(LayerParam::QkvBias),
                    q_norm: find(LayerParam::QNorm),
                    k_norm: find(LayerParam::KNorm),
                    output: projection(LayerParam::Output),
                    mlp_norm: must(LayerParam::MlpNorm),
                    gate_up: projection(LayerParam::GateUp),
                    down: projection(LayerParam::Down),
                }
            })
            .collect();
        let embed = params.must(ParamId::Embed);
        let head = params.find(ParamId::Head).unwrap_or_else(|| embed.clone());
        let final_norm = params.must(ParamId::FinalNorm);
        Self { embed, layers, final_norm, head, params }
    }

    /// Random weights: matrices normal with `config.initializer_range`, norms one, biases zero; a function of `seed` alone.
    pub fn randomise(&mut self, device: &B, config: &ModelConfig, seed: u64) {
        let Params { slab, specs, views, .. } = &mut self.params;
        device.fill(slab, 0.0);
        for (index, (spec, view)) in specs.iter().zip(views).enumerate() {
            match spec.id {
                ParamId::Layer(_, LayerParam::QkvBias) => {}
                _ if spec.is_matrix() => {
                    let seed = seed.wrapping_add(index as u64).wrapping_mul(0x2545_F491_4F6C_DD1D);
                    device.fill_normal(view, config.initializer_range, seed);
                }
                _ => device.fill(view, 1.0),
            }
        }
    }
}

/// Gradients of what is trained, f32. What is absent is frozen, or not there at all.
pub struct Grads<B: Backend> {
    params: Params<B>,
    /// `[V, D]`.
    pub embed: Option<Tensor<B>>,
    /// The layers' gradients.
    pub layers: Vec<LayerGrads<B>>,
    /// `[D]`.
    pub final_norm: Option<Tensor<B>>,
    /// `[V, D]`; the embedding's where they are tied.
    pub head: Option<MatrixGrad<B>>,
    /// Whether everything was zero once: padding stays so.
    cleared: bool,
}

/// One layer's gradients; shapes in [`LayerParam`].
#[expect(missing_docs, reason = "named and documented as the variants of LayerParam")]
pub struct LayerGrads<B: Backend> {
    pub attention_norm: Option<Tensor<B>>,
    pub qkv: ProjectionGrad<B>,
    pub qkv_bias: Option<Tensor<B>>,
    pub q_norm: Option<Tensor<B>>,
    pub k_norm: Option<Tensor<B>>,
    pub output: ProjectionGrad<B>,
    pub mlp_norm: Option<Tensor<B>>,
    pub gate_up: ProjectionGrad<B>,
    pub down: ProjectionGrad<B>,
}

impl<B: Backend> LayerGrads<B> {
    fn matrices(&mut self) -> impl Iterator<Item = &mut MatrixGrad<B>> {
        [&mut self.qkv, &mut self.output, &mut self.gate_up, &mut self.down].into_iter().filter_map(|grad| grad.weight.as_mut())
    }
}

impl<B: Backend> Deref for Grads<B> {
    type Target = Params<B>;
    fn deref(&self) -> &Params<B> {
        &self.params
    }
}

impl<B: Backend> DerefMut for Grads<B> {
    fn deref_mut(&mut self) -> &mut Params<B> {
        &mut self.params
    }
}

impl<B: Backend> Grads<B> {
    /// Views `slab`, which holds a gradient for each of [`trained_specs`].
    pub fn new(config: &ModelConfig, slab: Tensor<B>, lora: Option<&LoraConfig>) -> Self {
        let params = Params::new(trained_specs(config, lora), slab);
        let layers = (0..config.num_layers)
            .map(|layer| {
                let find = |param| params.find(ParamId::Layer(layer, param));
                let projection = |param| {
                    let adapters = lora.map(|lora| params.adapters(config, lora, layer, param));
                    let weight = find(param).map(|tensor| MatrixGrad { tensor, write: Write::Accumulate });
                    ProjectionGrad { weight, adapters: adapters.unwrap_or_default() }
                };
                LayerGrads {
                    attention_norm: find(LayerParam::AttentionNorm),
                    qkv: projection(LayerParam::Qkv),
                    qkv_bias: find(LayerParam::QkvBias),
                    q_norm: find(LayerParam::QNorm),
                    k_norm: find(LayerParam::KNorm),
                    output: projection(LayerParam::Output),
                    mlp_norm: find(LayerParam::MlpNorm),
                    gate_up: projection(LayerParam::GateUp),
                    down: projection(LayerParam::Down),
                }
            })
            .collect();
        let embed = params.find(ParamId::Embed);
        let head = params.find(ParamId::Head).or_else(|| embed.clone());
        let head = head.map(|tensor| MatrixGrad { tensor, write: Write::Accumulate });
        let final_norm = params.find(ParamId::FinalNorm);
        Self { embed, layers, final_norm, head, params, cleared: false }
    }

    /// Begins a step: what products give is overwritten by the first of them, so that it need be neither cleared nor read;
    /// everything else becomes zero.
    pub fn begin(&mut self, device: &B) {
        if !std::mem::replace(&mut self.cleared, true) {
            device.fill(&mut self.params.slab, 0.0);
        }
        let Params { specs, views, .. } = &mut self.params;
        let tied = !specs.iter().any(|spec| spec.id == ParamId::Head);
        for (spec, view) in specs.iter().zip(views) {
            if is_product(spec.id) { device.poison(view) } else { device.fill(view, 0.0) }
        }
        for matrix in self.matrices(tied) {
            matrix.write = Write::Overwrite;
        }
    }

    /// Ends a step: a matrix that no product was written to has no gradient.
    pub fn end(&mut self, device: &B) {
        for matrix in self.matrices(false).filter(|matrix| matrix.write == Write::Overwrite) {
            device.fill(&mut matrix.tensor, 0.0);
            matrix.write = Write::Accumulate;
        }
    }

    /// What products are written to; without the head where it is the embedding, to which lookups are added too.
    fn matrices(&mut self, tied: bool) -> impl Iterator<Item = &mut MatrixGrad<B>> {
        self.layers.iter_mut().flat_map(LayerGrads::matrices).chain(self.head.as_mut().filter(|_| !tied))
    }
}

/// Whether the gradient is a sum of products alone.
fn is_product(id: ParamId) -> bool {
    use LayerParam::{Down, GateUp, Output, Qkv};
    matches!(id, ParamId::Head | ParamId::Layer(_, Qkv | Output | GateUp | Down))
}
