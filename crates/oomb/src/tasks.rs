//! Long-context tasks in the manner of RULER (arXiv 2404.06654), made for any length, text and tokenizer, and scored by
//! what is answered. It must not know who answers: a model, or a test.

mod fit;
mod haystack;
mod report;
mod words;
mod write;

pub use haystack::Haystack;
pub use report::{Cell, Report, Scored};

use crate::data::Tokenizer;
use crate::random::Random;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// One number hidden at a given depth.
    Needle,
    /// The same among other keys and numbers, spread over the text.
    MultiKey,
    /// Four numbers of one key.
    MultiValue,
    /// The numbers of four keys.
    MultiQuery,
    /// Which variables were assigned a value, over a chain of assignments.
    Variables,
    /// The ten most common words of a list.
    CommonWords,
    /// The three most frequent of words whose frequencies follow a power law.
    FrequentWords,
}

impl Task {
    /// All, in the order in which they are listed.
    pub const ALL: [Self; 7] = [
        Self::Needle,
        Self::MultiKey,
        Self::MultiValue,
        Self::MultiQuery,
        Self::Variables,
        Self::CommonWords,
        Self::FrequentWords,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Needle => "needle",
            Self::MultiKey => "multikey",
            Self::MultiValue => "multivalue",
            Self::MultiQuery => "multiquery",
            Self::Variables => "variables",
            Self::CommonWords => "common",
            Self::FrequentWords => "frequent",
        }
    }

    /// Whether what is asked for stands in one place, so that its depth can be chosen.
    pub fn has_depth(self) -> bool {
        matches!(self, Self::Needle | Self::MultiKey)
    }

    /// Tokens that an answer may have; part of the length. Enough for the answer where every character is a token.
    pub fn answer_tokens(self) -> usize {
        match self {
            Self::Needle | Self::MultiKey => 32,
            Self::MultiValue | Self::MultiQuery | Self::CommonWords => 128,
            Self::Variables | Self::FrequentWords => 64,
        }
    }
}

/// What cannot be made or answered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not even the question fits.
    #[error("task {task} does not fit {length} tokens: question and answer alone take {needed}; take a greater length")]
    TooShort {
        /// The task's name.
        task: &'static str,
        /// Tokens that were asked for.
        length: usize,
        /// Tokens without any text around.
        needed: usize,
    },
    /// A haystack without words.
    #[error("the haystack has no words")]
    EmptyHaystack,
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] crate::data::Error),
    /// Whoever answers could not.
    #[error("task {task} at {length} tokens: no answer")]
    Answer {
        /// The task's name.
        task: &'static str,
        /// Tokens that were asked for.
        length: usize,
        /// Why.
        source: AnswerError,
    },
}

/// What an [`Answerer`] may say instead of an answer.
pub type AnswerError = Box<dyn std::error::Error + Send + Sync>;

/// A prompt and what a good answer contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// What is asked.
    pub task: Task,
    /// Tokens of prompt and answer together, at most.
    pub length: usize,
    /// Where the answer stands, percent of the text; only where [`Task::has_depth`].
    pub depth: Option<u8>,
    /// The text.
    pub prompt: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// What the answer must contain.
    pub answers: Vec<String>,
}

impl Sample {
    /// The share of the answers that `prediction` contains, upper or lower case: RULER's `string_match_all`.
    pub fn score(&self, prediction: &str) -> f64 {
        let prediction = prediction.to_lowercase();
        let found = self.answers.iter().filter(|answer| prediction.contains(&answer.to_lowercase())).count();
        found as f64 / self.answers.len() as f64
    }
}

/// Who answers.
pub trait Answerer {
    /// At most `max_tokens` tokens that go on from the sample's prompt, as text.
    ///
    /// # Errors
    /// Ends the evaluation.
    fn answer(&mut self, sample: &Sample, max_tokens: usize) -> Result<String, AnswerError>;
}

/// What is to be asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Suite {
    /// Which tasks.
    pub tasks: Vec<Task>,
    /// Lengths in tokens, the answer's included.
    pub lengths: Vec<usize>,
    /// Percent of the text, for the tasks that have a depth.
    pub depths: Vec<u8>,
    /// Of each task, length and depth.
    pub samples: usize,
    /// Same seed, same samples.
    pub seed: u64,
}

impl Suite {
    /// The cells of the result: task, length, depth.
    pub fn cells(&self) -> Vec<(Task, usize, Option<u8>)> {
        let depths = |task: &Task| -> Vec<Option<u8>> {
            if task.has_depth() { self.depths.iter().copied().map(Some).collect() } else { vec![None] }
        };
        let of = |task: &Task| {
            let task = *task;
            let lengths = self.lengths.iter();
            lengths.flat_map(move |&length| depths(&task).into_iter().map(move |depth| (task, length, depth))).collect::<Vec<_>>()
        };
        self.tasks.iter().flat_map(of).collect()
    }

    /// One sample: as many tokens as there is room for, the answer's included.
    ///
    /// # Errors
    /// If the length is too short for the task, or the tokenizer refuses.
    pub fn sample(
        &self,
        (task, length, depth): (Task, usize, Option<u8>),
        index: usize,
        haystack: &Haystack,
        tokenizer: &Tokenizer,
    ) -> Result<Sample, Error> {
        let place = [task as u64, length as u64, depth.map_or(u64::MAX, u64::from), index as u64];
        let seed = place.into_iter().fold(self.seed, |seed, part| Random::new(seed ^ part.wrapping_mul(0x9E37_79B9)).bits());
        let room = length.saturating_sub(task.answer_tokens());
        let draft = write::draft(task, room, depth, haystack, &mut Random::new(seed));
        let too_short = |base: usize| Error::TooShort { task: task.name(), length, needed: base + task.answer_tokens() };
        let (prompt, ids) = fit::fit(tokenizer, room, &draft.render)?.map_err(too_short)?;
        Ok(Sample { task, length, depth, prompt, ids, answers: draft.answers })
    }

    /// Asks everything; `each` is told how many samples are done and the last.
    ///
    /// # Errors
    /// If a sample cannot be made, or there is no answer.
    pub fn run(
        &self,
        haystack: &Haystack,
        tokenizer: &Tokenizer,
        answerer: &mut dyn Answerer,
        each: &mut dyn FnMut(usize, &Scored),
    ) -> Result<Report, Error> {
        let mut scored = Vec::new();
        for cell in self.cells() {
            for index in 0..self.samples {
                let sample = self.sample(cell, index, haystack, tokenizer)?;
                let named = |source| Error::Answer { task: cell.0.name(), length: cell.1, source };
                let prediction = answerer.answer(&sample, cell.0.answer_tokens()).map_err(named)?;
                scored.push(Scored::new(&sample, prediction));
                each(scored.len(), scored.last().expect("one was just pushed"));
            }
        }
        Ok(Report::new(self, scored))
    }
}
