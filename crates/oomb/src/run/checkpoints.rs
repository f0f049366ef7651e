//! A run's state on its way between an engine and a checkpoint. It must not know when one is due.

use super::{Error, Result};
use crate::checkpoint::{self, Adapter, Checkpoint as WeightFiles, Values};
use crate::config::{Config, StateDtype};
use crate::engine::Engine;
use crate::engine::optimizer::Part;
use crate::model::params::{ParamSpec, param_specs};
use crate::state::{Checkpoint, Moment, Saved, Source};
use crate::train;
use half::bf16;
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
        Ok(train::full_values(self.0, self.index(spec))?)
    }

    fn moment(&mut self, moment: Moment, spec: &ParamSpec) -> checkpoint::Result<Vec<u8>> {
        let (device, state) = (&self.0.device, self.0.optimizer.as_ref().expect("an engine for training"));
        let elements = &self.0.trained().ranges[self.index(spec)];
        let mut bytes = Vec::new();
        state.read(device, part_of(moment), elements, |run| {
            match run.dtype() {
                DType::U8 => bytes.extend(device.download_u8(&run)?),
                DType::Bf16 => {
                    let values: Vec<bf16> = device.download_f32(&run)?.into_iter().map(bf16::from_f32).collect();
                    bytes.extend_from_slice(bytemuck::cast_slice(&values));
                }
                _ => bytes.extend_from_slice(bytemuck::cast_slice(&device.download_f32(&run)?)),
            }
            Ok(())
        })?;
        Ok(bytes)
    }
}

fn part_of(moment: Moment) -> Part {
    match moment {
        Moment::First => Part::M,
        Moment::Second => Part::V,
        Moment::FirstScales => Part::MScales,
        Moment::SecondScales => Part::VScales,
    }
}

/// The configuration with what it leaves open of the optimizer's state as the checkpoint has it: what was chosen by the memory
/// that was free then must not change with the memory that is free now.
pub fn with_state_of(config: &Config, saved: &Saved) -> Config {
    let mut config = config.clone();
    let optimizer = &mut config.optimizer;
    if optimizer.state_dtype == StateDtype::Auto {
        optimizer.state_dtype = saved.moments.parse().unwrap_or(StateDtype::Auto);
    }
    optimizer.master_weights.get_or_insert(saved.f32_weights);
    config
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
    device.fill(&mut trained.slab, 0.0);
    for (index, elements) in trained.ranges.iter().enumerate() {
        let mut values = Vec::with_capacity(elements.len());
        for (name, _) in &trained.specs[index].sources {
            values.extend(files.tensor(name)?.to_f32());
        }
        // A weight in bf16 is its master rounded, after every update; without a master it is in the checkpoint as it is.
        device.upload(&mut trained.views[index], HostData::F32(&values));
        if state.state().masters {
            state.write(device, Part::Master, elements, |run, own| device.upload(run, HostData::F32(&values[own])));
        }
    }
    let dtype = state.state().dtype;
    checkpoint.moments(&trained.specs, dtype, |moment, index, bytes| {
        let part = part_of(moment);
        state.write(device, part, &trained.ranges[index], |run, own| match run.dtype() {
            DType::U8 => device.upload(run, HostData::U8(&bytes[own])),
            DType::Bf16 => device.upload(run, HostData::Bf16(&bytemuck::pod_collect_to_vec(&bytes[2 * own.start..2 * own.end]))),
            _ => device.upload(run, HostData::F32(&bytemuck::pod_collect_to_vec(&bytes[4 * own.start..4 * own.end]))),
        });
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
