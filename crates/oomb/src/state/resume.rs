//! Where a run begins: anew, after a checkpoint, or not at all because it is finished. It must not touch what is there.

use super::{Change, Checkpoint, Checkpoints, Error, Result, changes};
use crate::config::Config;
use crate::run_folder::{CONFIG_FILE, trained_folder};

/// Where a run begins.
#[derive(Debug, Clone, PartialEq)]
pub enum Beginning {
    /// There is no run in the folder.
    New,
    /// There is a run that died before its first checkpoint.
    Again,
    /// After this checkpoint.
    After(Box<Checkpoint>),
    /// The run is done and its model or adapter is there.
    Finished,
}

/// What [`find`] found, and what a person should know of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Where to begin.
    pub beginning: Beginning,
    /// Damaged checkpoints, changed settings: one line each.
    pub notes: Vec<String>,
}

/// Looks at the folder `run.out` of a run that is to be resumed with `config`.
///
/// # Errors
/// If the configuration changed in a way that changes what is trained, or no checkpoint is intact.
pub fn find(config: &Config) -> Result<Found> {
    let folder = &config.run.out;
    let newest = Checkpoints::of(folder).newest()?;
    let mut notes: Vec<String> = newest.damaged.iter().map(|error| format!("{error}; it is not used")).collect();
    let path = folder.join(CONFIG_FILE);
    let old = match &newest.checkpoint {
        Some(checkpoint) => checkpoint.config.clone(),
        None if path.exists() => Config::load(&path, &[]).map_err(|error| Error::damaged(&path, error.to_string()))?,
        None => {
            return Ok(Found { beginning: Beginning::New, notes: vec![format!("there is no run in {} yet", folder.display())] });
        }
    };
    let changes = changes(&old, config);
    refuse(&changes, config)?;
    notes.extend(changes.iter().filter_map(|change| {
        Some(format!("{} is {} now, it was {} ({})", change.key, change.new, change.old, change.harmless?))
    }));
    let done = folder.join(trained_folder(config)).is_dir();
    let beginning = match newest.checkpoint {
        Some(checkpoint) if done && checkpoint.saved.step == config.run.steps => Beginning::Finished,
        Some(checkpoint) if checkpoint.saved.step > config.run.steps => {
            let (step, steps) = (checkpoint.saved.step, config.run.steps);
            let hint = format!("set run.steps to {step} or more");
            let changes = format!("  run.steps is {steps} now, but {step} steps are done");
            return Err(Error::Changed { path: folder.clone(), changes, hint });
        }
        Some(checkpoint) => {
            if checkpoint.oomb != env!("CARGO_PKG_VERSION") {
                let (was, is) = (&checkpoint.oomb, env!("CARGO_PKG_VERSION"));
                notes.push(format!("{} was written by oomb {was}, this is {is}: rounding may differ", checkpoint.name()));
            }
            Beginning::After(Box::new(checkpoint))
        }
        None if done && changes.iter().all(|change| change.key != "run.steps") => Beginning::Finished,
        None if done => {
            let changes = listed(changes.iter());
            let hint = "the run is finished and has no checkpoint to go on from".to_owned();
            return Err(Error::Changed { path: folder.clone(), changes, hint });
        }
        None => {
            notes.push(format!("the run in {} had no checkpoint yet", folder.display()));
            Beginning::Again
        }
    };
    Ok(Found { beginning, notes })
}

fn refuse(changes: &[Change], config: &Config) -> Result<()> {
    let refused: Vec<&Change> = changes.iter().filter(|change| change.harmless.is_none()).collect();
    if refused.is_empty() {
        return Ok(());
    }
    let mut hint =
        "set it back, or start a new run from the weights: `oomb export` them and set model.path to the export".to_owned();
    if refused.iter().any(|change| change.key == "run.steps") {
        hint += "; run.steps may change only with a constant learning rate: otherwise it changes the rate of every step";
    }
    Err(Error::Changed { path: config.run.out.clone(), changes: listed(refused.into_iter()), hint })
}

fn listed<'a>(changes: impl Iterator<Item = &'a Change>) -> String {
    let lines: Vec<String> =
        changes.map(|change| format!("  {} is {} now, it was {}", change.key, change.new, change.old)).collect();
    lines.join("\n")
}
