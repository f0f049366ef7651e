//! What differs between the configuration of a run and the one with which it is resumed, and whether the run may go on so.
//! It must not know how a setting works, only what it may change.

use crate::config::{Config, LrSchedule};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// Settings that may change in the middle of a run, each with the reason. Any other changes what is trained.
const HARMLESS: [(&str, &str); 23] = [
    ("run.out", "the run's folder was moved"),
    ("run.log_every", "only what is shown"),
    ("run.checkpoint_every", "only when state is written"),
    ("run.keep_checkpoints", "only which checkpoints stay"),
    ("run.on_not_finite", "only what happens to steps that would end the run"),
    ("run.validate_every", "validation trains nothing"),
    ("run.validation_sequences", "validation trains nothing; the best loss is sought anew"),
    ("data.validation", "validation trains nothing; the best loss is sought anew"),
    ("data.train", "the tokens are compared by checksum"),
    ("data.tokenizer", "the tokens are compared by checksum"),
    ("run.device", "rounding only"),
    ("run.threads", "sums have a fixed order, whatever the threads"),
    ("schedule.keep", "what is not kept is computed again"),
    ("schedule.keep_budget", "what is not kept is computed again"),
    ("schedule.keep_host_budget", "what is not kept is computed again"),
    ("schedule.chunk_tokens", "rounding only"),
    ("schedule.loss_tile_tokens", "rounding only"),
    ("kv.page_tokens", "rounding only"),
    ("kv.device_budget", "where pages live: rounding only"),
    ("kv.group_pages", "how pages move: rounding only"),
    ("kv.prefetch_groups", "when pages move"),
    ("optimizer.placement", "where state lives"),
    ("run.steps", "with a constant learning rate"),
];

/// Settings that a run that goes on takes from its checkpoint where they are left open.
const FROM_CHECKPOINT: [&str; 2] = ["optimizer.state_dtype", "optimizer.master_weights"];

/// A setting whose value differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// `"run.steps"`.
    pub key: String,
    /// Of the run, as TOML.
    pub old: String,
    /// As asked for now.
    pub new: String,
    /// Why the run may go on so; `None` where it may not.
    pub harmless: Option<&'static str>,
}

/// Every setting that differs, by section and key.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let (before, after) = (settings(old), settings(new));
    let constant = [old, new].iter().all(|config| config.optimizer.schedule == LrSchedule::Constant);
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let value =
        |settings: &BTreeMap<String, String>, key: &String| settings.get(key).map_or("not set", String::as_str).to_owned();
    let left_open = |key: &String| {
        let open = |settings: &BTreeMap<String, String>| settings.get(key).is_some_and(|value| value == "\"auto\"");
        FROM_CHECKPOINT.contains(&key.as_str()) && (open(&before) || open(&after))
    };
    let changed = keys.into_iter().filter(|key| before.get(*key) != after.get(*key) && !left_open(key));
    changed
        .map(|key| {
            let reason = HARMLESS.iter().find(|(harmless, _)| harmless == key).map(|(_, reason)| *reason);
            let harmless = reason.filter(|_| key != "run.steps" || constant);
            Change { key: key.clone(), old: value(&before, key), new: value(&after, key), harmless }
        })
        .collect()
}

/// The resolved configuration as `section.key` and value.
fn settings(config: &Config) -> BTreeMap<String, String> {
    let table: Table = config.to_toml().parse().expect("a resolved configuration is TOML");
    let mut settings = BTreeMap::new();
    for (section, keys) in table {
        let Value::Table(keys) = keys else { continue };
        settings.extend(keys.into_iter().map(|(key, value)| (format!("{section}.{key}"), value.to_string())));
    }
    settings
}
