//! The checkpoints in a run's folder: which there are, whether one is intact, which is the newest and the best, which go.
//! It must not know what is done with them.

use super::save::{Moment, moment_name};
use super::sums::{self, sync_folder};
use super::{CHECKPOINTS_FOLDER, Error, FORMAT, OPTIMIZER_FILE, Result, STATE_FILE, Saved, StateFile, VERSION, WEIGHTS_FOLDER};
use crate::checkpoint::{self, TensorFile};
use crate::config::Config;
use crate::model::params::ParamSpec;
use crate::run_folder::{ADAPTER_FOLDER, CONFIG_FILE};
use oomb_device::DType;
use std::path::{Path, PathBuf};

const PREFIX: &str = "step-";

/// The folder `checkpoints` of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint all of whose files are what was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Where it lies.
    pub folder: PathBuf,
    /// Its state.
    pub saved: Saved,
    /// The configuration it was written under.
    pub config: Config,
    /// Version of the program that wrote it.
    pub oomb: String,
}

/// What [`Checkpoints::newest`] found.
#[derive(Debug)]
pub struct Newest {
    /// The newest that is intact; `None` where there is none at all.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones, each with what is wrong with it.
    pub damaged: Vec<Error>,
}

impl Checkpoints {
    /// Those of the run in `folder`.
    pub fn of(run: &Path) -> Self {
        Self { folder: run.join(CHECKPOINTS_FOLDER) }
    }

    /// Where they lie.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The place of a checkpoint.
    pub fn path(&self, step: usize) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step}"))
    }

    /// Where one is being written or removed.
    pub(super) fn partial(&self, step: usize) -> PathBuf {
        self.folder.join(format!(".{PREFIX}{step}.partial"))
    }

    /// Steps of the checkpoints there are, ascending.
    ///
    /// # Errors
    /// If the folder exists and cannot be read.
    pub fn steps(&self) -> Result<Vec<usize>> {
        let names = self.names()?;
        let steps = names.iter().filter_map(|name| name.strip_prefix(PREFIX)?.parse().ok());
        let mut steps: Vec<usize> = steps.filter(|&step| names.contains(&format!("{PREFIX}{step}"))).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Opens a checkpoint: reads all of it once and compares with its checksums.
    ///
    /// # Errors
    /// What is missing, truncated or altered.
    pub fn open(&self, step: usize) -> Result<Checkpoint> {
        let folder = self.path(step);
        sums::verify(&folder)?;
        let (saved, oomb) = read_state(&folder)?;
        let path = folder.join(CONFIG_FILE);
        let config = Config::load(&path, &[]).map_err(|error| Error::damaged(&path, error.to_string()))?;
        Ok(Checkpoint { folder, saved, config, oomb })
    }

    /// The newest intact checkpoint, and the damaged ones that are newer.
    ///
    /// # Errors
    /// If there are checkpoints, but none that is intact; if one is of another format version.
    pub fn newest(&self) -> Result<Newest> {
        let mut damaged = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.open(step) {
                Ok(checkpoint) => return Ok(Newest { checkpoint: Some(checkpoint), damaged }),
                Err(version @ Error::Version { .. }) => return Err(version),
                Err(error) => damaged.push(error),
            }
        }
        if damaged.is_empty() {
            return Ok(Newest { checkpoint: None, damaged });
        }
        let problems: Vec<String> = damaged.iter().map(|error| format!("  {error}")).collect();
        Err(Error::NoneIntact { path: self.folder.clone(), problems: problems.join("\n") })
    }

    /// The checkpoint called `best` or `step-N`.
    ///
    /// # Errors
    /// If there is none, with those that there are; if it is damaged.
    pub fn named(&self, name: &str) -> Result<Checkpoint> {
        let steps = self.steps()?;
        let step = match name {
            "best" => self.best(&steps),
            _ => name.strip_prefix(PREFIX).and_then(|step| step.parse().ok()).filter(|step| steps.contains(step)),
        };
        let Some(step) = step else {
            let names: Vec<String> = steps.iter().map(|step| format!("{PREFIX}{step}")).collect();
            let there = match (names.is_empty(), name) {
                (true, _) => "none".to_owned(),
                (false, "best") => format!("{}, none of them validated", names.join(", ")),
                (false, _) => names.join(", "),
            };
            return Err(Error::Missing { path: self.folder.clone(), name: name.to_owned(), there });
        };
        self.open(step)
    }

    /// Removes all but the `keep` newest and the best.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn prune(&self, keep: usize) -> Result<()> {
        let steps = self.steps()?;
        let best = self.best(&steps);
        let old = &steps[..steps.len().saturating_sub(keep)];
        for &step in old.iter().filter(|&&step| Some(step) != best) {
            // Under its own name it is always whole.
            let (path, partial) = (self.path(step), self.partial(step));
            std::fs::rename(&path, &partial).map_err(Error::io("remove", &path))?;
            std::fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))?;
        }
        Ok(())
    }

    /// Makes the folder ready for a run that goes on after `step`: removes what was being written or removed when an
    /// earlier process died, and sets later checkpoints (which are damaged) aside as `damaged-step-N`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn clean(&self, step: usize) -> Result<()> {
        for name in self.names()?.iter().filter(|name| name.starts_with(&format!(".{PREFIX}")) && name.ends_with(".partial")) {
            let path = self.folder.join(name);
            std::fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        }
        for later in self.steps()?.into_iter().filter(|&later| later > step) {
            let (path, aside) = (self.path(later), self.folder.join(format!("damaged-{PREFIX}{later}")));
            if aside.exists() {
                std::fs::remove_dir_all(&aside).map_err(Error::io("remove", &aside))?;
            }
            std::fs::rename(&path, &aside).map_err(Error::io("rename", &path))?;
        }
        if self.folder.exists() { sync_folder(&self.folder) } else { Ok(()) }
    }

    /// The step with the lowest validation loss, the earlier of equals.
    fn best(&self, steps: &[usize]) -> Option<usize> {
        let loss = |step: usize| read_state(&self.path(step)).ok()?.0.validation_loss.filter(|loss| loss.is_finite());
        let measured = steps.iter().filter_map(|&step| Some((loss(step)?, step)));
        measured.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, step)| step)
    }

    fn names(&self) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io("read", &self.folder)(error)),
        };
        let name =
            |entry: std::io::Result<std::fs::DirEntry>| entry.map(|entry| entry.file_name().to_string_lossy().into_owned());
        entries.map(name).collect::<std::io::Result<_>>().map_err(Error::io("read", &self.folder))
    }
}

impl Checkpoint {
    /// `step-N`.
    pub fn name(&self) -> String {
        format!("{PREFIX}{}", self.saved.step)
    }

    /// The folder of its weights: a Hugging Face checkpoint in f32.
    pub fn weights(&self) -> PathBuf {
        self.folder.join(WEIGHTS_FOLDER)
    }

    /// The folder of its adapter, where the run trains one: a PEFT adapter in f32.
    pub fn adapter(&self) -> PathBuf {
        self.folder.join(ADAPTER_FOLDER)
    }

    /// Reads the optimizer's state of each of `specs`, whose moments are stored in `dtype`, one array at a time.
    ///
    /// # Errors
    /// If the file is not that of these parameters, or cannot be read.
    pub fn moments(
        &self,
        specs: &[ParamSpec],
        dtype: DType,
        mut take: impl FnMut(Moment, usize, &[u8]),
    ) -> checkpoint::Result<()> {
        let file = TensorFile::open(&self.folder.join(OPTIMIZER_FILE))?;
        for (moment, dtype) in Moment::all(dtype) {
            for (index, spec) in specs.iter().enumerate() {
                take(moment, index, &file.bytes(&moment.tensor(&moment_name(spec)), &moment.shape(spec), dtype)?);
            }
        }
        Ok(())
    }
}

fn read_state(folder: &Path) -> Result<(Saved, String)> {
    let path = folder.join(STATE_FILE);
    let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let damaged = |error: serde_json::Error| Error::damaged(&path, error.to_string());
    let file: StateFile = serde_json::from_slice(&text).map_err(damaged)?;
    if file.format != FORMAT {
        return Err(Error::damaged(&path, format!("its format is {:?}, wanted {FORMAT:?}", file.format)));
    }
    if file.version != VERSION {
        return Err(Error::Version { path, got: file.version, wanted: VERSION, oomb: file.oomb });
    }
    Ok((serde_json::from_value(file.state).map_err(damaged)?, file.oomb))
}
