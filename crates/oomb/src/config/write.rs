//! The configuration with every default filled in, as TOML that reads back to the same. It must not know where it is put.

use super::{Config, LrSchedule, ModelSource, TokenizerSource};
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
        out.section("data");
        out.value("train", paths(&self.data.train));
        if let Some(validation) = &self.data.validation {
            out.value("validation", paths(validation));
        }
        out.value("sequence_tokens", self.data.sequence_tokens);
        match &self.data.tokenizer {
            Some(TokenizerSource::Bytes) => out.value("tokenizer", text("bytes")),
            Some(TokenizerSource::Path(file)) => out.value("tokenizer", path(file)),
            None => {}
        }
        out.value("sequences_per_step", self.data.sequences_per_step);
        out.section("schedule");
        out.value("chunk_tokens", self.schedule.chunk_tokens);
        out.value("keep", text(self.schedule.keep));
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
        if validates {
            out.value("validate_every", self.run.validate_every);
            out.value("validation_sequences", self.run.validation_sequences);
        }
        out.text
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
    }
}

#[derive(Default)]
struct Writer {
    text: String,
}

impl Writer {
    fn section(&mut self, name: &str) {
        let gap = if self.text.is_empty() { "" } else { "\n" };
        self.text += &format!("{gap}[{name}]\n");
    }

    fn value(&mut self, key: &str, value: impl Display) {
        self.text += &format!("{key} = {value}\n");
    }
}

fn text(value: impl Display) -> Value {
    Value::String(value.to_string())
}

fn path(value: &Path) -> Value {
    text(value.display())
}

fn paths(values: &[PathBuf]) -> Value {
    match values {
        [single] => path(single),
        several => Value::Array(several.iter().map(|value| path(value)).collect()),
    }
}

fn or_auto(value: Option<usize>) -> String {
    value.map_or_else(|| text("auto").to_string(), |value| value.to_string())
}
