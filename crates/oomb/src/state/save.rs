//! Writes a checkpoint, one parameter in memory at a time: beside its place, synced, and renamed when it is whole. It must
//! not know where the values come from.

use super::sums::{self, sync_folder, write_synced};
use super::{Checkpoints, Error, FORMAT, OPTIMIZER_FILE, Result, STATE_FILE, Saved, StateFile, VERSION, WEIGHTS_FOLDER};
use super::{check_room, checkpoint_bytes};
use crate::checkpoint::{self, AdapterExport, Export, Sum, TensorWriter, WeightType};
use crate::config::Config;
use crate::model::config::ModelConfig;
use crate::model::lora::{LoraConfig, trained_specs};
use crate::model::params::ParamSpec;
use crate::run_folder::{ADAPTER_FOLDER, CONFIG_FILE};
use oomb_device::DType;
use oomb_device::ops::moments::BLOCK_ELEMENTS;
use std::path::{Path, PathBuf};

/// An array of AdamW's state of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// `m`
    First,
    /// `v`
    Second,
    /// Scales of `m` in 8 bits.
    FirstScales,
    /// Scales of `v` in 8 bits.
    SecondScales,
}

impl Moment {
    /// Those of a state whose moments are stored in `dtype`, in the order in which they are written, with their own types.
    pub(super) fn all(dtype: DType) -> Vec<(Self, DType)> {
        let mut all = vec![(Self::First, dtype), (Self::Second, dtype)];
        if dtype == DType::U8 {
            all.extend([(Self::FirstScales, DType::F32), (Self::SecondScales, DType::F32)]);
        }
        all
    }

    /// Its shape for a parameter.
    pub(super) fn shape(self, spec: &ParamSpec) -> Vec<usize> {
        match self {
            Self::First | Self::Second => spec.shape.clone(),
            Self::FirstScales | Self::SecondScales => vec![spec.len().div_ceil(BLOCK_ELEMENTS)],
        }
    }

    /// Name of the array of the tensor `name` in a file.
    pub(super) fn tensor(self, name: &str) -> String {
        match self {
            Self::First => format!("m.{name}"),
            Self::Second => format!("v.{name}"),
            Self::FirstScales => format!("m_scales.{name}"),
            Self::SecondScales => format!("v_scales.{name}"),
        }
    }
}

/// Where the values of a checkpoint come from; each is asked for once, in the order of [`trained_specs`].
pub trait Source {
    /// A parameter in f32: its master where there is one.
    ///
    /// # Errors
    /// If the device fails.
    fn weights(&mut self, spec: &ParamSpec) -> checkpoint::Result<Vec<f32>>;

    /// An array of its state, the elements as they lie in memory.
    ///
    /// # Errors
    /// If the device fails.
    fn moment(&mut self, moment: Moment, spec: &ParamSpec) -> checkpoint::Result<Vec<u8>>;
}

/// What goes into a checkpoint beside the values.
pub struct Contents<'a> {
    /// State.
    pub saved: &'a Saved,
    /// All settings.
    pub config: &'a Config,
    /// Which weights.
    pub trained: Trained<'a>,
    /// Storage of the moments: f32, bf16 or U8.
    pub moments: DType,
}

/// What is trained, and so what a checkpoint holds; written in f32.
pub enum Trained<'a> {
    /// All of the model.
    Model(Export<'a>),
    /// An adapter beside a model that stays as it is.
    Adapter(AdapterExport<'a>),
}

impl Trained<'_> {
    fn shape(&self) -> (&ModelConfig, Option<&LoraConfig>) {
        match self {
            Self::Model(export) => (export.config, None),
            Self::Adapter(export) => (export.model, Some(export.lora)),
        }
    }
}

impl Checkpoints {
    /// Writes a checkpoint and returns its folder. When this returns it is on the disk, whatever happens next.
    ///
    /// # Errors
    /// If the disk refuses or the device fails; nothing of it is left then, and the checkpoints there are stay as they are.
    pub fn save(&self, contents: &Contents<'_>, source: &mut dyn Source) -> Result<PathBuf> {
        let folder = self.folder();
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let (model, lora) = contents.trained.shape();
        let wanted = checkpoint_bytes(model, lora, contents.moments);
        check_room(folder, wanted, "a checkpoint needs", "remove files there")?;
        let (out, partial) = (self.path(contents.saved.step), self.partial(contents.saved.step));
        std::fs::create_dir(&partial).map_err(Error::io("create", &partial))?;
        let written = write_into(&partial, contents, source).and_then(|()| {
            sync_folder(&partial)?;
            std::fs::rename(&partial, &out).map_err(Error::io("rename the finished checkpoint to", &out))?;
            sync_folder(folder)
        });
        if written.is_err() {
            // The first error is the one to report.
            let _ = std::fs::remove_dir_all(&partial);
        }
        written.map(|()| out)
    }
}

fn write_into(folder: &Path, contents: &Contents<'_>, source: &mut dyn Source) -> Result<()> {
    let mut known: Vec<(PathBuf, Sum)> = Vec::new();
    match &contents.trained {
        Trained::Model(export) => {
            let export = Export { weights: WeightType::F32, ..export.clone() };
            let weights = checkpoint::write_summed(&folder.join(WEIGHTS_FOLDER), &export, |spec| source.weights(spec))?;
            known.extend(weights.into_iter().map(|(name, sum)| (Path::new(WEIGHTS_FOLDER).join(name), sum)));
        }
        Trained::Adapter(export) => {
            checkpoint::write_adapter(&folder.join(ADAPTER_FOLDER), export, |spec| source.weights(spec))?;
        }
    }
    let (model, lora) = contents.trained.shape();
    let (_, sum) = write_moments(&folder.join(OPTIMIZER_FILE), &trained_specs(model, lora), contents.moments, source)?;
    known.push((OPTIMIZER_FILE.into(), sum));
    write_synced(&folder.join(CONFIG_FILE), contents.config.to_toml().as_bytes())?;
    write_synced(&folder.join(STATE_FILE), state_json(contents.saved).as_bytes())?;
    sums::write(folder, &known)
}

fn write_moments(path: &Path, specs: &[ParamSpec], dtype: DType, source: &mut dyn Source) -> Result<(PathBuf, Sum)> {
    let mut tensors: Vec<(String, Vec<usize>, DType)> = Vec::new();
    for (moment, dtype) in Moment::all(dtype) {
        tensors.extend(specs.iter().map(|spec| (moment.tensor(&moment_name(spec)), moment.shape(spec), dtype)));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, shape, dtype)| (name.as_str(), shape.as_slice(), *dtype)).collect();
    let mut writer = TensorWriter::create_mixed(path, &tensors)?;
    for (moment, _) in Moment::all(dtype) {
        for spec in specs {
            writer.push_bytes(&source.moment(moment, spec)?)?;
        }
    }
    Ok(writer.finish()?)
}

/// A parameter's tensor in [`OPTIMIZER_FILE`]: fused parameters stay whole there, named after all they hold.
pub(super) fn moment_name(spec: &ParamSpec) -> String {
    spec.sources.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("+")
}

fn state_json(saved: &Saved) -> String {
    let state = serde_json::to_value(saved).expect("plain numbers and words");
    let oomb = env!("CARGO_PKG_VERSION").to_owned();
    let file = StateFile { format: FORMAT.to_owned(), version: VERSION, oomb, state };
    serde_json::to_string_pretty(&file).expect("plain numbers and words") + "\n"
}
