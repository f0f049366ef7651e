//! The parameters as tensors: one slab, a view for each parameter. Weights, gradients and both moments share this form,
//! so that element `i` of one slab belongs to element `i` of the others.

use super::config::ModelConfig;
use super::params::{LayerParam, ParamId, ParamSpec, param_specs};
use oomb_device::{Backend, Tensor};
use std::ops::Range;

/// Parameters start at multiples of this many elements, so that vector accesses are aligned.
const ALIGNMENT: usize = 128;

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

/// Views of one slab `[elements]`, by parameter.
pub struct Params<B: Backend> {
    /// All of it, padding included.
    pub slab: Tensor<B>,
    /// What lies where, in order.
    pub specs: Vec<ParamSpec>,
    /// One view for each of `specs`.
    pub views: Vec<Tensor<B>>,
    /// `[V, D]`.
    pub embed: Tensor<B>,
    /// The layers' parameters.
    pub layers: Vec<LayerParams<B>>,
    /// `[D]`.
    pub final_norm: Tensor<B>,
    /// `[V, D]`; the embedding itself where they are tied.
    pub head: Tensor<B>,
}

/// Views of one layer's parameters; shapes in [`LayerParam`].
#[expect(missing_docs, reason = "named and documented as the variants of LayerParam")]
pub struct LayerParams<B: Backend> {
    pub attention_norm: Tensor<B>,
    pub qkv: Tensor<B>,
    pub qkv_bias: Option<Tensor<B>>,
    pub q_norm: Option<Tensor<B>>,
    pub k_norm: Option<Tensor<B>>,
    pub output: Tensor<B>,
    pub mlp_norm: Tensor<B>,
    pub gate_up: Tensor<B>,
    pub down: Tensor<B>,
}

impl<B: Backend> Params<B> {
    /// Views `slab`, which has the elements that [`slab_layout`] says.
    pub fn new(config: &ModelConfig, slab: Tensor<B>) -> Self {
        let specs = param_specs(config);
        let (elements, ranges) = slab_layout(&specs);
        assert_eq!(slab.len(), elements, "elements of a parameter slab");
        let views: Vec<_> = specs.iter().zip(ranges).map(|(spec, range)| slab.narrow(range).reshape(&spec.shape)).collect();
        let find = |id| specs.iter().position(|spec| spec.id == id).map(|index| views[index].clone());
        let must = |id| find(id).unwrap_or_else(|| panic!("every model has {id:?}"));
        let layers = (0..config.num_layers)
            .map(|layer| LayerParams {
                attention_norm: must(ParamId::Layer(layer, LayerParam::AttentionNorm)),
                qkv: must(ParamId::Layer(layer, LayerParam::Qkv)),
                qkv_bias: find(ParamId::Layer(layer, LayerParam::QkvBias)),
                q_norm: find(ParamId::Layer(layer, LayerParam::QNorm)),
                k_norm: find(ParamId::Layer(layer, LayerParam::KNorm)),
                output: must(ParamId::Layer(layer, LayerParam::Output)),
                mlp_norm: must(ParamId::Layer(layer, LayerParam::MlpNorm)),
                gate_up: must(ParamId::Layer(layer, LayerParam::GateUp)),
                down: must(ParamId::Layer(layer, LayerParam::Down)),
            })
            .collect();
        let embed = must(ParamId::Embed);
        let head = find(ParamId::Head).unwrap_or_else(|| embed.clone());
        let final_norm = must(ParamId::FinalNorm);
        Self { embed, layers, final_norm, head, slab, specs, views }
    }

    /// Random weights: matrices normal with `config.initializer_range`, norms one, biases zero; a function of `seed` alone.
    pub fn randomise(&mut self, device: &B, config: &ModelConfig, seed: u64) {
        device.fill(&mut self.slab, 0.0);
        for (index, (spec, view)) in self.specs.iter().zip(&mut self.views).enumerate() {
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
