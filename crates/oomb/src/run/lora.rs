//! The adapter of a run: a new one or one to go on with, on its way to a device and back. It must not know the training loop.

use super::{Error, Result};
use crate::checkpoint::{self, Adapter, AdapterExport};
use crate::config::{LoraSettings, LoraSource, ModelSettings, ModelSource};
use crate::engine::Engine;
use crate::model::config::ModelConfig;
use crate::model::lora::{LoraConfig, initial_values};
use crate::model::weights::Params;
use crate::train::full_values;
use oomb_device::{Backend, HostData};
use std::path::Path;

/// What `[lora]` names.
pub struct Lora {
    config: LoraConfig,
    /// Where training goes on from; a new adapter otherwise.
    start: Option<Adapter>,
}

impl Lora {
    /// Opens the adapter where one is named. Reads no weights.
    ///
    /// # Errors
    /// If it is not one that can be trained with this model.
    pub fn open(settings: &LoraSettings, model: &ModelConfig) -> Result<Self> {
        let folder = match &settings.source {
            LoraSource::New(config) => return Ok(Self { config: config.clone(), start: None }),
            LoraSource::Adapter(folder) => folder,
        };
        let adapter = Adapter::open(folder, model)?;
        if adapter.dropout() != 0.0 && !settings.without_dropout {
            return Err(Error::Lora(format!(
                "the adapter in {} was trained with lora_dropout = {}, which is not supported: set lora.dropout = 0 to go on \
                 without it",
                folder.display(),
                adapter.dropout()
            )));
        }
        Ok(Self { config: adapter.lora().clone(), start: Some(adapter) })
    }

    /// Rank, factor and projections.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Fills the engine's adapter: from the folder, or with PEFT's start drawn from `seed`.
    ///
    /// # Errors
    /// If a file cannot be read.
    ///
    /// # Panics
    /// If the engine was planned for another adapter.
    pub fn load<B: Backend>(&self, engine: &mut Engine<B>, seed: u64) -> Result<()> {
        let Engine { device, adapter: Some(params), .. } = engine else { panic!("the engine has no adapter") };
        if let Some(adapter) = &self.start {
            return load_adapter(device, params, adapter);
        }
        device.fill(&mut params.slab, 0.0);
        for (index, (spec, view)) in params.specs.iter().zip(&mut params.views).enumerate() {
            device.upload(view, HostData::F32(&initial_values(spec, index, seed)));
        }
        Ok(())
    }
}

/// Fills the parameters of an adapter from its folder.
pub(super) fn load_adapter<B: Backend>(device: &B, params: &mut Params<B>, adapter: &Adapter) -> Result<()> {
    device.fill(&mut params.slab, 0.0);
    for (spec, view) in params.specs.iter().zip(&mut params.views) {
        for (name, rows) in &spec.sources {
            device.upload(&mut view.narrow(rows.clone()), adapter.tensor(name)?.as_host());
        }
    }
    Ok(())
}

/// Refuses an adapter to weights that nobody else has.
pub(super) fn check_base(lora: Option<&LoraSettings>, model: &ModelSettings) -> Result<()> {
    match (lora, &model.source) {
        (Some(_), ModelSource::Preset(name)) => Err(Error::Lora(format!(
            "[lora] trains an adapter to a checkpoint, but model.preset = \"{name}\" has random weights: set model.path instead, \
             or remove [lora]"
        ))),
        _ => Ok(()),
    }
}

/// What a folder with the engine's adapter holds beside its values.
pub(super) fn adapter_export<'a, B: Backend>(engine: &'a Engine<B>, base: Option<&'a Path>) -> AdapterExport<'a> {
    let lora = engine.plan.request.lora.as_ref().expect("an engine with an adapter");
    AdapterExport { model: &engine.config, lora, base: base.and_then(Path::to_str) }
}

/// Writes the engine's adapter as PEFT would, f32; `base` is where its model is.
///
/// # Errors
/// If the folder exists and is not empty, the disk refuses, or the device fails.
///
/// # Panics
/// If the engine has no adapter.
pub fn save_adapter<B: Backend>(engine: &Engine<B>, base: Option<&Path>, out: &Path) -> Result<()> {
    let export = adapter_export(engine, base);
    let mut parameters = 0..engine.trained().specs.len();
    checkpoint::write_adapter(out, &export, |_| {
        Ok(full_values(engine, parameters.next().expect("each parameter is asked for once"))?)
    })?;
    Ok(())
}
