//! LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`, read, written, and merged into the
//! weights of their base. It must not know where values go.

mod config;

use super::read::read_json;
use super::tensors::TensorWriter;
use super::values::{Tensors, Values};
use super::write::{WeightType, in_new_folder, write_json};
use super::{ADAPTER_CONFIG, ADAPTER_MODEL, Error, Result};
use crate::model::config::ModelConfig;
use crate::model::lora::{ALL_LINEAR, LoraConfig, Target, lora_specs};
use crate::model::params::ParamSpec;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// What PEFT puts before a module's name.
const PREFIX: &str = "base_model.model.";

/// A PEFT adapter whose tensors are known to be those of a model.
pub struct Adapter {
    lora: LoraConfig,
    dropout: f64,
    tensors: Tensors,
}

impl Adapter {
    /// Reads `adapter_config.json` and the header of `adapter_model.safetensors`, and checks that the tensors are those of
    /// adapters on the same projections of every layer of `model`. Which projections, the tensors say: PEFT's
    /// `target_modules` may be a pattern. Reads no weights.
    ///
    /// # Errors
    /// For everything that this program would compute differently from PEFT, by name, and for tensors that do not fit.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self> {
        let config_path = folder.join(ADAPTER_CONFIG);
        let not_an_adapter = |problem: &str| Error::NotAnAdapter { folder: folder.to_owned(), problem: problem.to_owned() };
        if !config_path.is_file() {
            let there = folder.is_dir();
            return Err(not_an_adapter(if there { "there is no adapter_config.json" } else { "there is no such folder" }));
        }
        let json = read_json(&config_path)?;
        let settings = config::read(&json).map_err(|source| Error::Config { path: config_path, source })?;
        let weights = folder.join(ADAPTER_MODEL);
        if !weights.is_file() {
            return Err(not_an_adapter("there is no adapter_model.safetensors; weights in other formats must be converted"));
        }
        let mut tensors = Tensors::default();
        tensors.add(weights)?;
        let targets = targets_of(&tensors);
        if targets.is_empty() {
            return Err(not_an_adapter("adapter_model.safetensors has no lora_A of any projection of a layer"));
        }
        let lora = LoraConfig { targets, ..settings.lora };
        let wanted: BTreeMap<String, Vec<usize>> =
            lora_specs(model, &lora).into_iter().flat_map(|spec| spec.sources.into_iter().zip([spec.shape])).map(named).collect();
        let problems = tensors.compare(&wanted).problems();
        if !problems.is_empty() {
            return Err(Error::AdapterMismatch { folder: folder.to_owned(), problems });
        }
        Ok(Self { lora, dropout: settings.dropout, tensors })
    }

    /// Rank, factor and projections.
    pub fn lora(&self) -> &LoraConfig {
        &self.lora
    }

    /// `lora_dropout`: what it was trained with.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Reads the values of a tensor, by PEFT's name.
    ///
    /// # Errors
    /// If the file cannot be read.
    ///
    /// # Panics
    /// If `name` is not a source of one of the adapter's parameters.
    pub fn tensor(&self, name: &str) -> Result<Values> {
        self.tensors.values(name)
    }

    /// The values of the base's tensor `name` (`"model.layers.0.self_attn.q_proj.weight"`) with the adapter in them:
    /// `w + scale · b a`, f32. A tensor that has no adapter is returned as it is.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn merged(&self, name: &str, base: Values) -> Result<Values> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let factor = |factor: &str| format!("{PREFIX}{module}.{factor}.weight");
        let Some(shape) = self.tensors.get(&factor("lora_A")).map(|entry| &entry.shape) else { return Ok(base) };
        let (rank, inputs, scale) = (shape[0], shape[1], self.lora.scale());
        let (a, b) = (self.tensor(&factor("lora_A"))?.to_f32(), self.tensor(&factor("lora_B"))?.to_f32());
        let mut merged = base.to_f32();
        merged.par_chunks_mut(inputs).zip(b.par_chunks(rank)).for_each_init(
            || vec![0.0; inputs],
            |sum: &mut Vec<f32>, (row, b)| {
                sum.fill(0.0);
                for (&b, a) in b.iter().zip(a.chunks_exact(inputs)) {
                    sum.iter_mut().zip(a).for_each(|(sum, &a)| *sum += b * a);
                }
                row.iter_mut().zip(sum).for_each(|(w, &mut sum)| *w += scale * sum);
            },
        );
        Ok(Values::F32(merged))
    }
}

fn named(((name, _), shape): ((String, std::ops::Range<usize>), Vec<usize>)) -> (String, Vec<usize>) {
    (name, shape)
}

/// The projections that have an adapter in some layer.
fn targets_of(tensors: &Tensors) -> Vec<Target> {
    let has = |target: &Target| {
        let end = format!(".{}.lora_A.weight", target.path());
        tensors.names().any(|name| name.starts_with(PREFIX) && name.ends_with(&end))
    };
    ALL_LINEAR.into_iter().filter(has).collect()
}

/// What to write beside the values.
#[derive(Debug, Clone)]
pub struct AdapterExport<'a> {
    /// The base's shape.
    pub model: &'a ModelConfig,
    /// The adapter's.
    pub lora: &'a LoraConfig,
    /// Where the base is, for those who load the adapter: `base_model_name_or_path`.
    pub base: Option<&'a str>,
}

/// Writes the folder `out` as PEFT would, f32. `values` returns the values of a parameter, row-major; it is called once for
/// each of [`lora_specs`], in order.
///
/// # Errors
/// If `out` exists and is not an empty folder, if the disk refuses, or if `values` fails; `out` is then as it was.
pub fn write_adapter(
    out: &Path,
    export: &AdapterExport<'_>,
    mut values: impl FnMut(&ParamSpec) -> Result<Vec<f32>>,
) -> Result<()> {
    in_new_folder(out, |folder| {
        write_json(&folder.join(ADAPTER_CONFIG), &config::write(export.lora, export.base))?;
        let specs = lora_specs(export.model, export.lora);
        let tensors: Vec<(&str, &[usize])> =
            specs.iter().map(|spec| (spec.sources[0].0.as_str(), spec.shape.as_slice())).collect();
        let mut file = TensorWriter::create(&folder.join(ADAPTER_MODEL), &tensors, WeightType::F32)?;
        for spec in &specs {
            file.push(&values(spec)?)?;
        }
        file.finish().map(drop)
    })
}
