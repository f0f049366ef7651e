//! Which model a configuration names, and its weights on their way to a device and back. It must not know the training
//! loop.

use super::lora::load_adapter;
use super::{Error, Result};
use crate::checkpoint::{self, Adapter, Checkpoint, DEFAULT_MAX_SHARD_BYTES, Export, Values, WeightType};
use crate::config::{ModelSettings, ModelSource, nearest};
use crate::engine::Engine;
use crate::model::config::ModelConfig;
use crate::model::families::replace_rope;
use crate::model::params::param_specs;
use crate::model::presets::{PRESETS, preset};
use oomb_device::{Backend, DType};
use std::path::{Path, PathBuf};

/// A model's shape, and the checkpoint that it comes from if it has one.
pub struct ModelFiles {
    /// The shape, with the configuration's own RoPE scaling.
    pub config: ModelConfig,
    checkpoint: Option<Checkpoint>,
    adapter: Option<Adapter>,
    loading: Option<Loading>,
}

/// Told while weights are read: bytes so far, and in all.
pub type Loading = Box<dyn Fn(u64, u64)>;

impl ModelFiles {
    /// Looks a preset up, or opens a checkpoint and checks that its tensors are the model's. Reads no weights.
    ///
    /// # Errors
    /// If there is no such preset, or the checkpoint is not one that can be trained.
    pub fn open(settings: &ModelSettings) -> Result<Self> {
        let mut files = match &settings.source {
            ModelSource::Preset(name) => Self { config: find_preset(name)?, checkpoint: None, adapter: None, loading: None },
            ModelSource::Path(folder) => {
                let checkpoint = Checkpoint::open(folder)?;
                Self { config: checkpoint.config().clone(), checkpoint: Some(checkpoint), adapter: None, loading: None }
            }
        };
        if let Some(parameters) = &settings.rope_scaling {
            replace_rope(&mut files.config, parameters).map_err(|e| Error::Rope(e.to_string()))?;
        }
        Ok(files)
    }

    /// Has `loading` told of each tensor that [`load_weights`] has read.
    pub fn with_loading(self, loading: Loading) -> Self {
        Self { loading: Some(loading), ..self }
    }

    /// The same model with a PEFT adapter.
    ///
    /// # Errors
    /// If the adapter was not made for this model, or the model is a preset.
    pub fn with_adapter(self, folder: &Path) -> Result<Self> {
        if self.checkpoint.is_none() {
            return Err(Error::Lora("an adapter belongs to a checkpoint: a preset has random weights".to_owned()));
        }
        Ok(Self { adapter: Some(Adapter::open(folder, &self.config)?), ..self })
    }

    /// Where the checkpoint is, where there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.checkpoint.as_ref().map(Checkpoint::folder)
    }

    /// `config.json` as the checkpoint has it.
    pub fn config_json(&self) -> Option<&serde_json::Value> {
        self.checkpoint.as_ref().map(Checkpoint::config_json)
    }

    /// The adapter, where there is one.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The values of a tensor, with the adapter merged into them.
    ///
    /// # Errors
    /// If a weight file cannot be read.
    ///
    /// # Panics
    /// If the model is a preset, or has no such tensor.
    pub fn tensor(&self, name: &str) -> checkpoint::Result<Values> {
        let values = self.checkpoint.as_ref().expect("a preset has no tensors").tensor(name)?;
        match &self.adapter {
            Some(adapter) => adapter.merged(name, values),
            None => Ok(values),
        }
    }

    /// The type in which the checkpoint has its weights: that of its first tensor.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn weight_type(&self) -> checkpoint::Result<WeightType> {
        let checkpoint = self.checkpoint.as_ref().expect("a preset has no tensors");
        let first = &param_specs(&self.config)[0].sources[0].0;
        Ok(match checkpoint.tensor(first)? {
            Values::F32(_) => WeightType::F32,
            Values::Bf16(_) | Values::F16(_) => WeightType::Bf16,
        })
    }

    /// The checkpoint's tokenizer files, those that there are.
    pub fn tokenizer_files(&self) -> Vec<PathBuf> {
        self.checkpoint.as_ref().map_or_else(Vec::new, |checkpoint| checkpoint::tokenizer_files(checkpoint.folder()))
    }

    /// What a folder with the weights of `engine` holds beside them; `tokenizer` are files to copy along.
    pub(super) fn export<'a, B: Backend>(&'a self, tokenizer: &'a [PathBuf], engine: &Engine<B>) -> Export<'a> {
        let weights = if engine.device.compute_dtype() == DType::Bf16 { WeightType::Bf16 } else { WeightType::F32 };
        Export {
            config: &self.config,
            config_json: self.checkpoint.as_ref().map(Checkpoint::config_json),
            files: tokenizer,
            weights,
            max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
        }
    }
}

fn find_preset(name: &str) -> Result<ModelConfig> {
    preset(name).ok_or_else(|| {
        let hint = match nearest(name, PRESETS.into_iter()) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("there are {}", PRESETS.join(", ")),
        };
        Error::UnknownPreset { name: name.to_owned(), hint }
    })
}

/// Fills the engine's weights: from the checkpoint, or at random from `seed`. The adapter of `files` goes into the engine's own
/// where it was planned with one, else into the weights.
///
/// # Errors
/// If a weight file cannot be read.
///
/// # Panics
/// If the engine was made for another model.
pub fn load_weights<B: Backend>(engine: &mut Engine<B>, files: &ModelFiles, seed: u64) -> Result<()> {
    let Engine { device, weights, adapter, config, .. } = engine;
    let Some(checkpoint) = &files.checkpoint else {
        weights.randomise(device, config, seed);
        return Ok(());
    };
    device.fill(&mut weights.slab, 0.0);
    let total = weights.specs.iter().flat_map(|spec| &spec.sources).map(|(name, _)| checkpoint.tensor_bytes(name)).sum();
    let mut done = 0;
    for (spec, view) in weights.specs.iter().zip(&weights.views) {
        for (name, rows) in &spec.sources {
            let values = if adapter.is_some() { checkpoint.tensor(name)? } else { files.tensor(name)? };
            device.upload(&mut view.narrow(rows.clone()), values.as_host());
            done += checkpoint.tensor_bytes(name);
            if let Some(loading) = &files.loading {
                loading(done, total);
            }
        }
    }
    match (adapter, &files.adapter) {
        (Some(params), Some(adapter)) => load_adapter(device, params, adapter),
        _ => Ok(()),
    }
}

/// Writes the engine's weights as a Hugging Face folder, in the type in which it computes; `tokenizer` are files to copy
/// along.
///
/// # Errors
/// If the folder exists and is not empty, the disk refuses, or the device fails.
pub fn save_weights<B: Backend>(engine: &Engine<B>, files: &ModelFiles, tokenizer: &[PathBuf], out: &Path) -> Result<()> {
    checkpoint::write(out, &files.export(tokenizer, engine), |spec| {
        let index = engine.weights.specs.iter().position(|own| own.id == spec.id).expect("the engine has every parameter");
        Ok(engine.device.download_f32(&engine.weights.views[index])?)
    })?;
    Ok(())
}
