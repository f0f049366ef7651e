//! What a run's folder tells: steps, configuration, plan, evaluation. It must not know how they are shown.

use super::{Error, Result};
use crate::metrics::METRICS_FILE;
use crate::run_folder::{CONFIG_FILE, EVALUATION_FILE, PLAN_FILE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// One optimizer step; what a line of `metrics.jsonl` does not have as a number is not a number here.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// From 1.
    pub step: u64,
    values: BTreeMap<String, f64>,
}

impl Step {
    /// A value by the name that it has in `metrics.jsonl`, if it is a number there.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }
}

/// The mean loss of the labels whose position in their sequence is in `from..to`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Deserialize)]
pub struct Bucket {
    /// First position.
    pub from: u64,
    /// One more than the last.
    pub to: u64,
    /// Nats; none where no label lies.
    pub loss: Option<f64>,
}

/// Everything of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunFiles {
    /// What it is called on the page.
    pub name: String,
    /// In order, each once: of a step that was done twice, the later.
    pub steps: Vec<Step>,
    /// `section.key` and value, in the order of the file; empty where there is none.
    pub settings: Vec<(String, String)>,
    /// `plan.txt`
    pub plan: Option<String>,
    /// Of `eval.json`; empty where there is none.
    pub buckets: Vec<Bucket>,
    /// Lines of `metrics.jsonl` that are not steps, such as a last one that was cut off.
    pub num_unreadable: usize,
}

impl RunFiles {
    /// Reads a run's folder, or a `metrics.jsonl` alone.
    ///
    /// # Errors
    /// If there is no step, or a file is there and cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let not = |problem: String| Error::NotARun { path: path.to_path_buf(), problem };
        let (folder, metrics) = match path.is_dir() {
            true => (Some(path), path.join(METRICS_FILE)),
            false => (None, path.to_path_buf()),
        };
        if !metrics.is_file() {
            let problem = if folder.is_some() { format!("it holds no {METRICS_FILE}") } else { "there is no such folder".into() };
            return Err(not(format!("{problem}; give the folder of a run (run.out of its configuration)")));
        }
        let (steps, num_unreadable) = read_steps(&read(&metrics)?.unwrap_or_default());
        if steps.is_empty() {
            return Err(not(format!("{} holds no step yet", metrics.display())));
        }
        let within = |name: &str| folder.map_or(Ok(None), |folder| read(&folder.join(name)));
        Ok(Self {
            name: name_of(path),
            steps,
            settings: within(CONFIG_FILE)?.map_or_else(Vec::new, |text| settings(&text)),
            plan: within(PLAN_FILE)?,
            buckets: within(EVALUATION_FILE)?.map_or_else(Vec::new, |text| buckets(&text)),
            num_unreadable,
        })
    }

    /// (step, value) wherever the step has one.
    pub fn series(&self, name: &str) -> Vec<(f64, f64)> {
        self.steps.iter().filter_map(|step| Some((step.step as f64, step.get(name)?))).collect()
    }
}

/// Opens runs; those of one name are told apart by their paths.
pub(super) fn open_all(paths: &[PathBuf]) -> Result<Vec<RunFiles>> {
    let mut runs = paths.iter().map(|path| RunFiles::open(path)).collect::<Result<Vec<_>>>()?;
    let names: Vec<_> = runs.iter().map(|run| run.name.clone()).collect();
    for (run, path) in runs.iter_mut().zip(paths) {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = path.display().to_string();
        }
    }
    Ok(runs)
}

fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// None where there is no such file.
fn read(path: &Path) -> Result<Option<String>> {
    match fs::read(path) {
        Ok(content) => Ok(Some(String::from_utf8_lossy(&content).into_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

fn read_steps(text: &str) -> (Vec<Step>, usize) {
    let mut steps = BTreeMap::new();
    let mut num_unreadable = 0;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match read_step(line) {
            Some(step) => drop(steps.insert(step.step, step)),
            None => num_unreadable += 1,
        }
    }
    (steps.into_values().collect(), num_unreadable)
}

fn read_step(line: &str) -> Option<Step> {
    let value: Value = serde_json::from_str(line).ok()?;
    let step = value.get("step")?.as_u64()?;
    let numbers = value.as_object()?.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)));
    Some(Step { step, values: numbers.collect() })
}

fn settings(text: &str) -> Vec<(String, String)> {
    let Ok(table) = text.parse::<toml::Table>() else { return Vec::new() };
    let mut settings = Vec::new();
    for (section, value) in &table {
        match value {
            toml::Value::Table(keys) => settings.extend(keys.iter().map(|(key, v)| (format!("{section}.{key}"), v.to_string()))),
            other => settings.push((section.clone(), other.to_string())),
        }
    }
    settings
}

fn buckets(text: &str) -> Vec<Bucket> {
    let value: Option<Value> = serde_json::from_str(text).ok();
    let buckets = value.as_ref().and_then(|value| value.get("buckets")).cloned();
    buckets.and_then(|buckets| serde_json::from_value(buckets).ok()).unwrap_or_default()
}
