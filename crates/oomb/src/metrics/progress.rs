//! Progress of a run on a terminal, or as plain lines. It must not know files.

use super::Record;
use crate::config::{Bytes, format_count};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Who reads the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// A person at a terminal: one line that moves.
    Terminal,
    /// A file or a pipe: lines that stay, without control characters.
    Pipe,
}

impl Audience {
    /// A terminal only where both outputs are one: a bar on one of them would tear lines on the other.
    pub fn of_this_process() -> Self {
        if io::stdout().is_terminal() && io::stderr().is_terminal() { Self::Terminal } else { Self::Pipe }
    }
}

/// Shows steps as they are done.
pub struct Progress<W: Write> {
    steps: usize,
    log_every: usize,
    bar: Option<ProgressBar>,
    lines: W,
    /// Of all steps shown, validation not included.
    elapsed_seconds: f64,
    num_shown: usize,
}

impl<W: Write> Progress<W> {
    /// Progress towards `steps`; plain lines go to `lines` every `log_every` steps.
    pub fn new(audience: Audience, steps: usize, log_every: usize, lines: W) -> Self {
        let bar = (audience == Audience::Terminal).then(|| {
            let style = ProgressStyle::with_template("{bar:24} {msg}").expect("the template is a constant that parses");
            let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr()).with_style(style);
            bar.enable_steady_tick(Duration::from_millis(500));
            bar.set_message(format!("step 0/{steps}"));
            bar
        });
        Self { steps, log_every, bar, lines, elapsed_seconds: 0.0, num_shown: 0 }
    }

    /// Shows a step.
    ///
    /// # Errors
    /// If the output is gone.
    pub fn step(&mut self, record: &Record) -> io::Result<()> {
        self.elapsed_seconds += record.seconds;
        self.num_shown += 1;
        let line = self.line(record);
        match &self.bar {
            Some(bar) => {
                bar.set_position(record.step as u64);
                if let Some(loss) = record.validation_loss {
                    bar.println(format!("step {}/{}  validation loss {loss:.4}", record.step, self.steps));
                }
                bar.set_message(line);
            }
            None => {
                let due = record.step.is_multiple_of(self.log_every) || record.step == self.steps || record.step == 1;
                if due || record.validation_loss.is_some() {
                    writeln!(self.lines, "{line}")?;
                    self.lines.flush()?;
                }
            }
        }
        Ok(())
    }

    /// Shows a line that stays.
    ///
    /// # Errors
    /// If the output is gone.
    pub fn note(&mut self, text: &str) -> io::Result<()> {
        match &self.bar {
            Some(bar) => {
                bar.println(text);
                Ok(())
            }
            None => {
                writeln!(self.lines, "{text}")?;
                self.lines.flush()
            }
        }
    }

    /// Leaves the last state on the terminal.
    pub fn finish(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn line(&self, record: &Record) -> String {
        let left = self.elapsed_seconds / self.num_shown as f64 * self.steps.saturating_sub(record.step) as f64;
        let validation = record.validation_loss.map_or_else(String::new, |loss| format!("  validation loss {loss:.4}"));
        let width = self.steps.to_string().len();
        format!(
            "step {:>width$}/{}  loss {:.4}{validation}  grad norm {:.3}  lr {:.2e}  {} tok/s  device {}  host {}  left {}",
            record.step,
            self.steps,
            record.loss,
            record.grad_norm,
            record.lr,
            format_count(record.tokens_per_second.round() as u64),
            Bytes(record.device_bytes),
            Bytes(record.host_bytes),
            duration(left),
        )
    }
}

/// `2:05:09`, `5:09`, `9 s`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: usize) -> Record {
        Record {
            step,
            loss: 5.123_456,
            grad_norm: 1.5,
            lr: 3e-4,
            tokens: 65_536,
            seconds: 40.0,
            tokens_per_second: 1638.4,
            device_bytes: 3 << 29,
            host_bytes: 0,
            in_bytes: 0,
            out_bytes: 0,
            page_hit_rate: None,
            epoch: 0.5,
            validation_loss: (step == 4).then_some(5.0),
            skipped: false,
        }
    }

    #[test]
    fn piped_lines_are_plain_and_no_more_than_asked_for() {
        let mut lines = Vec::new();
        let mut progress = Progress::new(Audience::Pipe, 7, 3, &mut lines);
        for step in 1..=7 {
            progress.step(&record(step)).unwrap();
        }
        progress.finish();
        insta::assert_snapshot!(String::from_utf8(lines).unwrap(), @"
        step 1/7  loss 5.1235  grad norm 1.500  lr 3.00e-4  1,638 tok/s  device 1.50 GiB  host 0 B  left 4:00
        step 3/7  loss 5.1235  grad norm 1.500  lr 3.00e-4  1,638 tok/s  device 1.50 GiB  host 0 B  left 2:40
        step 4/7  loss 5.1235  validation loss 5.0000  grad norm 1.500  lr 3.00e-4  1,638 tok/s  device 1.50 GiB  host 0 B  left 2:00
        step 6/7  loss 5.1235  grad norm 1.500  lr 3.00e-4  1,638 tok/s  device 1.50 GiB  host 0 B  left 40 s
        step 7/7  loss 5.1235  grad norm 1.500  lr 3.00e-4  1,638 tok/s  device 1.50 GiB  host 0 B  left 0 s
        ");
    }

    #[test]
    fn durations() {
        assert_eq!([9.4, 309.0, 7509.0].map(duration), ["9 s", "5:09", "2:05:09"]);
    }
}
