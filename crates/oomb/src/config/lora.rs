//! `[lora]`: adapters instead of a training of all weights. It must not know what an adapter computes.

use super::error::Result;
use super::nearest;
use super::read::{Document, Refusal, Setting};
use crate::model::lora::{ALL_LINEAR, LoraConfig, Target};
use std::path::PathBuf;
use toml::Value;

/// `[lora]`: low-rank adapters beside frozen weights. The section alone turns it on; every key has a default.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSettings {
    /// A new adapter, or one to go on with.
    pub source: LoraSource,
    /// `dropout = 0`, the only value there is: needed to go on with an adapter that was trained with dropout. Default: not said.
    pub without_dropout: bool,
}

/// Where training starts.
#[derive(Debug, Clone, PartialEq)]
pub enum LoraSource {
    /// `rank` (r, default 16: enough for most fine-tuning), `alpha` (factor alpha / r, default 2 · rank, so that the factor is
    /// 2 whatever the rank), `rslora` (alpha / √r, default false as in PEFT), `target_modules` (names of projections or
    /// `"all-linear"`, the default: adapters everywhere learn more than larger ones on attention alone).
    New(LoraConfig),
    /// `path`: folder of a PEFT adapter, which says all of the above. Default: none.
    Adapter(PathBuf),
}

const DEFAULT_RANK: usize = 16;

pub(super) fn read(document: &Document) -> Result<Option<LoraSettings>> {
    let section = document.section("lora");
    if !section.is_given() {
        return Ok(None);
    }
    let (path, rank, alpha) = (section.optional::<PathBuf>("path")?, section.optional("rank")?, section.optional("alpha")?);
    let (rslora, targets) = (section.optional("rslora")?, section.optional::<Targets>("target_modules")?);
    let dropout: Option<f64> = section.optional("dropout")?;
    if let Some(dropout) = dropout.filter(|&dropout| dropout != 0.0) {
        let problem = format!("= {dropout} is not supported: adapters are trained without dropout, remove it or set it to 0");
        return Err(document.invalid("lora.dropout", problem));
    }
    let without_dropout = dropout.is_some();
    if let Some(path) = path {
        let given = [
            ("rank", rank.is_some()),
            ("alpha", alpha.is_some()),
            ("rslora", rslora.is_some()),
            ("target_modules", targets.is_some()),
        ];
        if let Some((key, _)) = given.iter().find(|(_, given)| *given) {
            let problem = "is what the adapter in lora.path says: remove one of the two";
            return Err(document.invalid(&format!("lora.{key}"), problem));
        }
        return Ok(Some(LoraSettings { source: LoraSource::Adapter(path), without_dropout }));
    }
    let rank = rank.unwrap_or(DEFAULT_RANK);
    if rank == 0 {
        return Err(document.invalid("lora.rank", "must be at least 1, got 0: without adapters, remove [lora]"));
    }
    let alpha = alpha.unwrap_or(2.0 * rank as f64);
    if !(alpha > 0.0 && alpha.is_finite()) {
        return Err(document.invalid("lora.alpha", format!("must be above 0, got {alpha}")));
    }
    let targets = targets.map_or_else(|| ALL_LINEAR.to_vec(), |targets| targets.0);
    let new = LoraConfig { rank, alpha, rslora: rslora.unwrap_or(false), targets };
    Ok(Some(LoraSettings { source: LoraSource::New(new), without_dropout }))
}

/// Projections, in order and each once.
struct Targets(Vec<Target>);

impl Setting for Targets {
    const WANTED: &'static str = "\"all-linear\" or an array of names ([\"q_proj\", \"v_proj\"])";
    fn read(value: &Value) -> std::result::Result<Self, Refusal> {
        let names = match value {
            Value::String(text) if text == "all-linear" => return Ok(Self(ALL_LINEAR.to_vec())),
            Value::String(text) => vec![text.as_str()],
            Value::Array(items) => items.iter().map(Value::as_str).collect::<Option<_>>().ok_or(Refusal::WrongType)?,
            _ => return Err(Refusal::WrongType),
        };
        if names.is_empty() {
            return Err(Refusal::Because("is empty: name at least one projection, or remove [lora]".to_owned()));
        }
        let mut targets = names.into_iter().map(target).collect::<std::result::Result<Vec<_>, _>>()?;
        targets.sort_unstable();
        targets.dedup();
        Ok(Self(targets))
    }
}

fn target(name: &str) -> std::result::Result<Target, Refusal> {
    Target::parse(name).ok_or_else(|| {
        let known = ALL_LINEAR.map(Target::name);
        let hint = match nearest(name, known.into_iter()) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("there are {}, and \"all-linear\" for all of them", known.join(", ")),
        };
        Refusal::Because(format!("names \"{name}\", which is no projection of a layer: {hint}"))
    })
}
