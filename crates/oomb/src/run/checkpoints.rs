//! A run's state on its way between an engine and a checkpoint. It must not know when one is due.

use super::{Error, Result};
use crate::checkpoint::{self, Adapter, Checkpoint as WeightFiles, Values};
use crate::engine::Engine;
use crate::model::params::{ParamSpec, param_specs};
use crate::state::{Checkpoint, Moment, Source};
use crate::train;
use oomb_device::{Backend, DType, HostData};

/// The values of an engine, one parameter at a time.
pub(super) struct EngineValues<'a, B: Backend>(pub(super) &'a Engine<B>);

impl<B: Backend> EngineValues<'_, B> {
    fn index(&self, spec: &ParamSpec) -> usize {
        self.0.trained().specs.iter().position(|own| own.id == spec.id).expect("the engine has every parameter")
    }
}

impl<B: Backend> Source for EngineValues<'_, B> {
    fn weights(&mut self, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>> {
        Ok(self.0.device.download_f32(&train::full_weights(self.0)[self.index(spec)])?)
    }

    fn moment(&mut self, moment: Moment, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>> {
        let state = self.0.optimizer.as_ref().expect("an engine for training");
        let moments = match moment {
            Moment::First => &state.m,
            Moment::Second => &state.v,
        };
        Ok(self.0.device.download_f32(&moments.views[self.index(spec)])?)
    }
}

/// Fills what is trained, masters and moments from a checkpoint: every element becomes what it was.
///
/// # Errors
/// If the checkpoint is of another model, a file cannot be read, or the device fails.
///
/// # Panics
/// If the engine was planned for evaluation.
pub(super) fn restore<B: Backend>(engine: &mut Engine<B>, checkpoint: &Checkpoint) -> Result<()> {
    let files = Files::open(engine, checkpoint)?;
    let Engine { device, weights, adapter, optimizer: Some(state), .. } = engine else { panic!("an engine for training") };
    let trained = adapter.as_mut().unwrap_or(weights);
    let full = state.master.as_mut().unwrap_or(trained);
    device.fill(&mut full.slab, 0.0);
    for (spec, view) in full.specs.iter().zip(&full.views) {
        for (name, rows) in &spec.sources {
            device.upload(&mut view.narrow(rows.clone()), files.tensor(name)?.as_host());
        }
    }
    if let Some(master) = &state.master {
        // A weight in bf16 is its master rounded, after every update.
        device.copy(&mut trained.slab, &master.slab);
    }
    for moments in [&mut state.m, &mut state.v] {
        device.fill(&mut moments.slab, 0.0);
    }
    checkpoint.moments(&trained.specs, |moment, index, values| {
        let moments = match moment {
            Moment::First => &mut state.m,
            Moment::Second => &mut state.v,
        };
        device.upload(&mut moments.views[index], HostData::F32(values));
    })?;
    Ok(device.synchronize()?)
}

/// What a checkpoint has of the weights.
enum Files {
    Model(Box<WeightFiles>),
    Adapter(Adapter),
}

impl Files {
    /// Opens what `engine` trains.
    fn open<B: Backend>(engine: &Engine<B>, checkpoint: &Checkpoint) -> Result<Self> {
        let other_model = || Error::OtherModel { path: checkpoint.folder.clone() };
        match &engine.plan.request.lora {
            Some(lora) => {
                let files = Adapter::open(&checkpoint.adapter(), &engine.config)?;
                if files.lora() == lora { Ok(Self::Adapter(files)) } else { Err(other_model()) }
            }
            None => {
                let files = WeightFiles::open(&checkpoint.weights())?;
                if param_specs(files.config()) == engine.weights.specs {
                    Ok(Self::Model(Box::new(files)))
                } else {
                    Err(other_model())
                }
            }
        }
    }

    fn tensor(&self, name: &str) -> checkpoint::Result<Values> {
        match self {
            Self::Model(files) => files.tensor(name),
            Self::Adapter(files) => files.tensor(name),
        }
    }
}

/// As `state.json` names it.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    if dtype == DType::Bf16 { "bf16" } else { "f32" }
}
