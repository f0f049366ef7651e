//! Progress of reading weights. It must not know files.

use super::Audience;
use crate::config::Bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::OnceCell;
use std::time::{Duration, Instant};

/// Shorter loads show nothing.
const A_MOMENT: Duration = Duration::from_secs(1);

/// A bar on a terminal, one line where output is piped; neither for a load that is soon over.
pub struct Loading {
    audience: Audience,
    started: OnceCell<Instant>,
    bar: OnceCell<ProgressBar>,
}

impl Loading {
    /// Time counts from the first call of [`Self::show`].
    pub fn new() -> Self {
        Self { audience: Audience::of_this_process(), started: OnceCell::new(), bar: OnceCell::new() }
    }

    /// `done` of `total` bytes are read.
    pub fn show(&self, done: u64, total: u64) {
        let elapsed = self.started.get_or_init(Instant::now).elapsed();
        if self.bar.get().is_none() && (elapsed < A_MOMENT || done == total) {
            return;
        }
        let bar = self.bar.get_or_init(|| self.begin(total));
        bar.set_position(done);
        if done == total {
            bar.finish_and_clear();
        }
    }

    fn begin(&self, total: u64) -> ProgressBar {
        if self.audience == Audience::Pipe {
            eprintln!("loading {} of weights", Bytes(total));
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("loading weights {bar:24} {binary_bytes} of {binary_total_bytes}  left {eta}");
        let style = style.expect("the template is a constant that parses");
        ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style)
    }
}

impl Default for Loading {
    fn default() -> Self {
        Self::new()
    }
}
