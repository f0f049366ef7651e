//! The loop over optimizer steps: when to validate, to save and to stop. It must not know how a step is computed nor how
//! a checkpoint is written.

use super::checkpoints::{EngineValues, dtype_name, restore};
use super::lora::{adapter_export, check_base};
use super::{Ended, Error, ModelFiles, Observer, Outcome, Result, StepRecord};
use super::{Lora, evaluate, learning_rate, load_weights, request, save_adapter, save_weights, step_seed, update_of};
use crate::config::{Config, OnNotFinite};
use crate::data::{Cursor, Order, Sequence, Sources, Windows};
use crate::engine::Engine;
use crate::plan::{Machine, Plan, Request};
use crate::state::{Checkpoint, Checkpoints, Contents, Saved, Trained};
use crate::train::{self, LossSum, StepLoss, finite};
use oomb_device::{Backend, DType};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Whether leaving a step out would help.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Skippable {
    Yes,
    No,
}

/// Steps in a row that may be skipped.
const MAX_SKIPPED: usize = 10;

/// A run that is ready to start: everything was read, checked, planned and allocated.
pub struct Run<B: Backend> {
    config: Config,
    files: ModelFiles,
    engine: Engine<B>,
    order: Order,
    train: Sources,
    validation: Option<Windows>,
    /// As it would be saved now, but for the cursor.
    state: Saved,
    checkpoints: Checkpoints,
    /// Step of the newest checkpoint.
    last_saved: Option<usize>,
}

impl<B: Backend> Run<B> {
    /// Plans, tells `planned`, allocates, and loads or makes the weights.
    ///
    /// # Errors
    /// If the data does not suit the model, the plan does not fit `machine`, or the device fails.
    pub fn new(
        device: &B,
        machine: &Machine,
        config: Config,
        files: ModelFiles,
        data: (Sources, Option<Windows>),
        planned: impl FnOnce(&Plan),
    ) -> Result<Self> {
        let (train, validation) = data;
        for windows in train.windows().chain(&validation) {
            windows.dataset().check_vocabulary(files.config.vocab_size)?;
        }
        device.check_attention(files.config.head_dim, config.kv.page_tokens)?;
        check_base(config.lora.as_ref(), &config.model)?;
        let lora = config.lora.as_ref().map(|settings| Lora::open(settings, &files.config)).transpose()?;
        let request = Request { lora: lora.as_ref().map(|lora| lora.config().clone()), ..request(&config, &files.config) };
        let plan = super::plan(&config, &request, machine, &device.hardware())?;
        planned(&plan);
        let mut engine = Engine::new(device, plan, config.kv.selection)?;
        load_weights(&mut engine, &files, config.run.seed)?;
        if let Some(lora) = lora {
            lora.load(&mut engine, config.run.seed)?;
        }
        train::start_optimizer(&mut engine);
        let moments = engine.plan.optimizer.expect("a run has an optimizer");
        let order = Order::new(&train.shares(), config.run.seed, Cursor::default());
        let state = Saved {
            step: 0,
            seed: config.run.seed,
            cursor: order.cursor(),
            data_crc32: train.fingerprint(),
            compute_dtype: dtype_name(device.compute_dtype()).to_owned(),
            moments: moments.dtype_name().to_owned(),
            f32_weights: moments.masters || device.compute_dtype() == DType::F32,
            updates: 0,
            skipped_in_a_row: 0,
            validation_loss: None,
            best_validation_loss: None,
        };
        let checkpoints = Checkpoints::of(&config.run.out);
        Ok(Self { config, files, engine, order, train, validation, state, checkpoints, last_saved: None })
    }

    /// Takes up the state of a checkpoint: what follows is what would have followed there.
    ///
    /// # Errors
    /// If it is of another model or other data, a file cannot be read, or the device fails.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let (got, saved) = (self.state.data_crc32, &checkpoint.saved);
        let shares = self.train.shares();
        if got != saved.data_crc32 || !saved.cursor.fits(&shares) {
            let path = checkpoint.folder.clone();
            return Err(crate::state::Error::OtherData { path, got, wanted: saved.data_crc32 }.into());
        }
        let words = |state: &Saved| {
            let weights = if state.f32_weights { "f32 weights" } else { "bf16 weights" };
            format!("an optimizer's state in {} of {weights}", state.moments)
        };
        let (was, is) = (words(saved), words(&self.state));
        if was != is {
            return Err(Error::OtherState { path: checkpoint.folder.clone(), was, is });
        }
        restore(&mut self.engine, checkpoint)?;
        self.order = Order::new(&shares, self.config.run.seed, saved.cursor.clone());
        let (old, new) = (&checkpoint.config, &self.config);
        let same_validation =
            (&old.data.validation, old.run.validation_sequences) == (&new.data.validation, new.run.validation_sequences);
        let best_validation_loss = saved.best_validation_loss.filter(|_| same_validation);
        let compute_dtype = self.state.compute_dtype.clone();
        self.state = Saved { compute_dtype, best_validation_loss, ..saved.clone() };
        self.last_saved = Some(saved.step);
        Ok(())
    }

    /// What was allocated.
    pub fn plan(&self) -> &Plan {
        &self.engine.plan
    }

    /// `"f32"` or `"bf16"`: in what the run computes.
    pub fn compute_dtype(&self) -> &str {
        &self.state.compute_dtype
    }

    /// Writes what was trained as it is now: the adapter as a PEFT folder, or else the model as a Hugging Face folder with the
    /// tokenizer of its checkpoint, or else of the data.
    ///
    /// # Errors
    /// If the folder exists and is not empty, the disk refuses, or the device fails.
    pub fn save(&self, out: &Path) -> Result<()> {
        match self.config.lora {
            Some(_) => save_adapter(&self.engine, self.files.folder(), out),
            None => save_weights(&self.engine, &self.files, &self.tokenizer_files(), out),
        }
    }

    fn tokenizer_files(&self) -> Vec<PathBuf> {
        let mut tokenizer = self.files.tokenizer_files();
        if tokenizer.is_empty() {
            tokenizer.extend(self.train.windows().find_map(|windows| windows.dataset().tokenizer_file()));
        }
        tokenizer
    }

    /// All steps that are left, or those until the observer wants to stop.
    ///
    /// # Errors
    /// If data cannot be read, the device fails, a checkpoint cannot be written, or numbers stop being finite.
    pub fn train(&mut self, observer: &mut dyn Observer) -> Result<Ended> {
        let steps = self.config.run.steps;
        while self.state.step < steps {
            let step = self.state.step + 1;
            let (started, before) = (Instant::now(), self.engine.traffic());
            let (loss, problem) = self.step(step)?;
            let record = StepRecord {
                step,
                loss,
                outcome: if problem.is_some() { Outcome::Skipped } else { Outcome::Updated },
                lr: learning_rate(&self.config, step),
                elapsed: started.elapsed(),
                epochs: self.order.epochs(),
                device_bytes: self.engine.device.device_bytes() + self.engine.device.workspace_bytes(),
                host_bytes: self.engine.device.pinned_bytes(),
                traffic: self.engine.traffic() - before,
            };
            let due = step.is_multiple_of(self.config.run.validate_every.max(1)) || step == steps;
            let validation = if due { self.validate()? } else { None };
            if let Some(problem) = problem {
                observer.note(&format!("step {step} is skipped: {problem}"))?;
            }
            observer.step(&record, validation)?;
            self.state.step = step;
            let improved = self.improved(validation);
            let stop = step < steps && observer.wants_to_stop();
            if stop
                || self.config.run.checkpoint_every.is_some_and(|every| improved || step.is_multiple_of(every) || step == steps)
            {
                let checkpoint = self.save_checkpoint(observer)?;
                if stop {
                    return Ok(Ended::Interrupted { step, checkpoint });
                }
            }
        }
        Ok(Ended::Done)
    }

    /// Loss and gradient of the next sequences, and the update; with the reason where there was no update.
    fn step(&mut self, step: usize) -> Result<(StepLoss, Option<String>)> {
        let windows = (0..self.config.data.sequences_per_step).map(|_| self.order.next_window());
        let sequences = windows.map(|window| self.train.get(window)).collect::<std::result::Result<Vec<_>, _>>()?;
        let loss = train::gradient(&mut self.engine, &sequences, step_seed(&self.config, step))?;
        let problem = self.problem_of(&loss, &sequences)?;
        if let Some(problem) = problem {
            self.state.skipped_in_a_row += 1;
            if self.config.run.on_not_finite == OnNotFinite::Stop {
                return Err(self.not_finite(step, problem, Skippable::Yes));
            }
            if self.state.skipped_in_a_row > MAX_SKIPPED {
                let problem = format!("{problem}; the {MAX_SKIPPED} steps before it were skipped");
                return Err(self.not_finite(step, problem, Skippable::No));
            }
            return Ok((loss, Some(problem)));
        }
        self.state.updates += 1;
        self.state.skipped_in_a_row = 0;
        train::update(&mut self.engine, &update_of(&self.config, step, self.state.updates));
        if !finite::weights_are_finite(&mut self.engine)? {
            let place = finite::first_bad_weight(&mut self.engine)?.unwrap_or_default();
            let problem = format!("after the update the weights are not finite, first {place}");
            return Err(self.not_finite(step, problem, Skippable::No));
        }
        self.engine.device.synchronize()?;
        Ok((loss, None))
    }

    /// What is not finite, and where first.
    fn problem_of(&mut self, loss: &StepLoss, sequences: &[Sequence]) -> Result<Option<String>> {
        let values = [("loss", loss.loss), ("gradient norm", loss.grad_norm)];
        let Some((what, value)) = values.into_iter().find(|(_, value)| !value.is_finite()) else { return Ok(None) };
        if let Some(place) = finite::first_bad_weight(&mut self.engine)? {
            return Ok(Some(format!("the {what} is {value}, and so are weights, first {place}")));
        }
        // A loss that is no number was spoilt on the way forward; a gradient alone, on the way back.
        let place = match finite::first_bad_layer(&mut self.engine, sequences)? {
            Some(place) => format!(", first in {place}"),
            None => match finite::first_bad_gradient(&mut self.engine)? {
                Some(name) => format!(", backwards first in the gradient of {name}"),
                None => String::new(),
            },
        };
        Ok(Some(format!("the {what} is {value}{place}")))
    }

    fn not_finite(&self, step: usize, problem: String, skippable: Skippable) -> Error {
        let cure = "lower optimizer.lr, set optimizer.clip_norm, or look at this step's data";
        let Some(saved) = self.last_saved else {
            return Error::NotFinite { step, problem, next: format!("there is no checkpoint yet: {cure}") };
        };
        let mut next = format!("the last checkpoint is {}, of a good model\n", self.checkpoints.path(saved).display());
        if skippable == Skippable::Yes {
            next += "to go on and leave such steps out, add --resume --set run.on_not_finite=skip\n";
        }
        next += &format!("to go on otherwise, `oomb export` it, start a new run with model.path set to the export, and {cure}");
        Error::NotFinite { step, problem, next }
    }

    /// Notes a validation loss; whether it is the lowest so far.
    fn improved(&mut self, validation: Option<LossSum>) -> bool {
        self.state.validation_loss = validation.map(|loss| loss.mean()).filter(|loss| loss.is_finite());
        let improved = match (self.state.validation_loss, self.state.best_validation_loss) {
            (Some(loss), Some(best)) => loss < best,
            (loss, _) => loss.is_some(),
        };
        if improved {
            self.state.best_validation_loss = self.state.validation_loss;
        }
        improved
    }

    fn save_checkpoint(&mut self, observer: &mut dyn Observer) -> Result<PathBuf> {
        observer.sync()?;
        self.state.cursor = self.order.cursor();
        let tokenizer = self.tokenizer_files();
        let trained = match &self.engine.plan.request.lora {
            Some(_) => Trained::Adapter(adapter_export(&self.engine, self.files.folder())),
            None => Trained::Model(self.files.export(&tokenizer, &self.engine)),
        };
        let moments = self.engine.plan.optimizer.expect("a run has an optimizer").dtype;
        let contents = Contents { saved: &self.state, config: &self.config, trained, moments };
        let step = self.state.step;
        let saved = self.checkpoints.save(&contents, &mut EngineValues(&self.engine));
        let checkpoint = saved.map_err(|source| Error::NotSaved { step, last: self.last_saved(), source: Box::new(source) })?;
        self.last_saved = Some(step);
        self.checkpoints.prune(self.config.run.keep_checkpoints)?;
        observer.note(&format!("checkpoint in {}", checkpoint.display()))?;
        Ok(checkpoint)
    }

    fn last_saved(&self) -> String {
        match self.last_saved {
            Some(step) => format!("the last is {}: go on from it with --resume", self.checkpoints.path(step).display()),
            None => "there is none before it".to_owned(),
        }
    }

    fn validate(&mut self) -> Result<Option<LossSum>> {
        let Some(windows) = &self.validation else { return Ok(None) };
        evaluate(&mut self.engine, windows, self.config.run.validation_sequences, &mut |_, _| {}).map(Some)
    }
}
