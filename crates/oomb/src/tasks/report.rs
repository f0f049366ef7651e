//! What was answered and how well: samples, means by task, length and depth, a table and a picture. It must not know how
//! samples are made.

use super::{Sample, Suite, Task};
use crate::plot::{HeatMap, short_count};
use serde::Serialize;
use std::fmt::Write;

/// A sample with its answer; the prompt is left out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scored {
    /// The task's name.
    pub task: &'static str,
    /// Tokens that were asked for.
    pub length: usize,
    /// Percent of the text.
    pub depth: Option<u8>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// What the answer should contain.
    pub answers: Vec<String>,
    /// What was answered.
    pub prediction: String,
    /// Share of `answers` in `prediction`.
    pub score: f64,
}

impl Scored {
    pub(super) fn new(sample: &Sample, prediction: String) -> Self {
        Self {
            task: sample.task.name(),
            length: sample.length,
            depth: sample.depth,
            prompt_tokens: sample.ids.len(),
            answers: sample.answers.clone(),
            score: sample.score(&prediction),
            prediction,
        }
    }
}

/// The mean over the samples of one task, length and depth.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The task's name.
    pub task: &'static str,
    /// Tokens that were asked for.
    pub length: usize,
    /// Percent of the text.
    pub depth: Option<u8>,
    /// How many.
    pub samples: usize,
    /// Mean score, 0 to 1.
    pub accuracy: f64,
}

/// The outcome of a suite.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Of the samples.
    pub seed: u64,
    /// Means.
    pub cells: Vec<Cell>,
    /// Every sample, in order.
    pub samples: Vec<Scored>,
    #[serde(skip)]
    lengths: Vec<usize>,
}

impl Report {
    pub(super) fn new(suite: &Suite, samples: Vec<Scored>) -> Self {
        let mean = |(task, length, depth): (Task, usize, Option<u8>)| {
            let of = |sample: &&Scored| (sample.task, sample.length, sample.depth) == (task.name(), length, depth);
            let scores: Vec<f64> = samples.iter().filter(of).map(|sample| sample.score).collect();
            let accuracy = scores.iter().sum::<f64>() / scores.len().max(1) as f64;
            Cell { task: task.name(), length, depth, samples: scores.len(), accuracy }
        };
        let cells = suite.cells().into_iter().map(mean).collect();
        Self { seed: suite.seed, cells, samples, lengths: suite.lengths.clone() }
    }

    /// Name of each row with a cell for each length.
    fn rows(&self) -> Vec<(String, Vec<Option<f64>>)> {
        let mut rows: Vec<(String, Vec<Option<f64>>)> = Vec::new();
        for cell in &self.cells {
            let name = cell.depth.map_or(cell.task.to_owned(), |depth| format!("{}, depth {depth} %", cell.task));
            let column = self.lengths.iter().position(|&length| length == cell.length);
            let column = column.expect("cells are of the suite's lengths");
            let row = match rows.iter().position(|(known, _)| *known == name) {
                Some(row) => row,
                None => {
                    rows.push((name, vec![None; self.lengths.len()]));
                    rows.len() - 1
                }
            };
            rows[row].1[column] = Some(cell.accuracy);
        }
        rows
    }

    fn columns(&self) -> Vec<String> {
        self.lengths.iter().map(|&length| short_count(length as u64)).collect()
    }

    /// Percent by task and depth (rows) and length (columns).
    pub fn table(&self) -> String {
        let (rows, columns) = (self.rows(), self.columns());
        let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).max(10);
        let mut text = format!("{:width$}", "accuracy %");
        for column in columns {
            write!(text, "  {column:>6}").expect("writing to a string cannot fail");
        }
        for (name, cells) in rows {
            write!(text, "\n{name:width$}").expect("writing to a string cannot fail");
            for cell in cells {
                let shown = cell.map_or("–".to_owned(), |accuracy| format!("{:.1}", 100.0 * accuracy));
                write!(text, "  {shown:>6}").expect("writing to a string cannot fail");
            }
        }
        text + "\n"
    }

    /// The table as a heat map.
    pub fn svg(&self, title: &str) -> String {
        HeatMap { title, columns: &self.columns(), x_label: "tokens, answer included", rows: &self.rows() }.svg()
    }
}
