//! The configuration with every default filled in, as TOML that reads back to the same. It must not know where it is put.

use super::{Config, LoraSource, LrSchedule, ModelSource};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use toml::Value;

impl Config {
    /// Every setting, resolved. [`Config::parse`] of it gives `self` again.
    pub fn to_toml(&self) -> String {
        let validates = self.data.validation.is_some();
        let mut out = Writer::default();
        out.section("model");
        match &self.model.source {
            ModelSource::Preset(name) => out.value("preset", text(name)),
            ModelSource::Path(folder) => out.value("path", path(folder)),
        }
        if let Some(scaling) = &self.model.rope_scaling {
            out.value("rope_scaling", Value::try_from(scaling).expect("the table came from TOML"));
        }
        self.write_lora(&mut out);
        self.data.write(&mut out);
        out.section("schedule");
        out.value("chunk_tokens", or_auto(self.schedule.chunk_tokens));
        out.value("keep", text(self.schedule.keep));
        let bytes_or_auto = |bytes: Option<u64>| bytes.map_or(text("auto"), |bytes| text(format!("{bytes}B")));
        out.value("keep_budget", bytes_or_auto(self.schedule.keep_budget_bytes));
        out.value("keep_host_budget", bytes_or_auto(self.schedule.keep_host_budget_bytes));
        out.value("loss_tile_tokens", or_auto(self.schedule.loss_tile_tokens));
        out.section("kv");
        out.value("page_tokens", self.kv.page_tokens);
        out.value("selection", text(self.kv.selection));
        out.value("grad_dtype", text(self.kv.grad_dtype));
        out.value("device_budget", self.kv.device_budget_bytes.map_or(text("auto"), |bytes| text(format!("{bytes}B"))));
        out.value("group_pages", or_auto(self.kv.group_pages));
        out.value("prefetch_groups", self.kv.prefetch_groups);
        self.write_optimizer(&mut out);
        out.section("run");
        out.value("out", path(&self.run.out));
        out.value("steps", self.run.steps);
        out.value("seed", self.run.seed);
        out.value("device", text(self.run.device));
        out.value("compute_dtype", text(self.run.compute_dtype));
        out.value("threads", or_auto(self.run.threads));
        out.value("log_every", self.run.log_every);
        out.value("tensorboard", self.run.tensorboard);
        out.value(
            "checkpoint_every",
            self.run.checkpoint_every.map_or_else(|| text("off").to_string(), |every| every.to_string()),
        );
        out.value("keep_checkpoints", self.run.keep_checkpoints);
        out.value("on_not_finite", text(self.run.on_not_finite));
        if validates {
            out.value("validate_every", self.run.validate_every);
            out.value("validation_sequences", self.run.validation_sequences);
        }
        out.text
    }

    fn write_lora(&self, out: &mut Writer) {
        let Some(lora) = &self.lora else { return };
        out.section("lora");
        match &lora.source {
            LoraSource::Adapter(folder) => out.value("path", path(folder)),
            LoraSource::New(new) => {
                out.value("rank", new.rank);
                out.value("alpha", Value::Float(new.alpha));
                out.value("rslora", new.rslora);
                out.value("target_modules", Value::Array(new.targets.iter().map(|target| text(target.name())).collect()));
            }
        }
        if lora.without_dropout {
            out.value("dropout", 0);
        }
    }

    fn write_optimizer(&self, out: &mut Writer) {
        let o = &self.optimizer;
        out.section("optimizer");
        out.value("name", text(o.name));
        out.value("lr", Value::Float(o.lr));
        out.value("betas", Value::Array(vec![Value::Float(o.betas.0), Value::Float(o.betas.1)]));
        out.value("eps", Value::Float(o.eps));
        out.value("weight_decay", Value::Float(o.weight_decay));
        out.value("decay_norms_and_biases", Value::Boolean(o.decay_norms_and_biases));
        out.value("clip_norm", o.clip_norm.map_or(text("off"), Value::Float));
        out.value("schedule", text(o.schedule));
        out.value("warmup_steps", o.warmup_steps);
        if o.schedule != LrSchedule::Constant {
            out.value("min_lr", Value::Float(o.min_lr));
        }
        out.value("state_dtype", text(o.state_dtype));
        out.value("master_weights", o.master_weights.map_or(text("auto"), Value::Boolean));
        out.value("placement", text(o.placement));
    }
}

/// TOML under way.
#[derive(Default)]
pub(super) struct Writer {
    text: String,
}

impl Writer {
    /// Begins a section.
    pub(super) fn section(&mut self, name: &str) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        self.text += &format!("{gap}[{name}]\n");
    }

    /// Adds a key to it.
    pub(super) fn value(&mut self, key: &str, value: impl Display) {
        self.text += &format!("{key} = {value}\n");
    }
}

/// A string.
pub(super) fn text(value: impl Display) -> Value {
    Value::String(value.to_string())
}

/// A path.
pub(super) fn path(value: &Path) -> Value {
    text(value.display())
}

/// One path, or an array of them.
pub(super) fn paths(values: &[PathBuf]) -> Value {
    match values {
        [single] => path(single),
        several => Value::Array(several.iter().map(|value| path(value)).collect()),
    }
}

fn or_auto(value: Option<usize>) -> String {
    value.map_or_else(|| text("auto").to_string(), |value| value.to_string())
}
