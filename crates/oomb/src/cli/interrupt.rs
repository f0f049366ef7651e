//! SIGINT and SIGTERM: the first asks the command to come to an end, the second ends it at once. It must not know what a
//! command has to finish.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Whether a signal came, and which.
#[derive(Clone, Default)]
pub(crate) struct Interrupts {
    signal: Arc<AtomicI32>,
}

impl Interrupts {
    /// Listens from now on; `answer` is what the first signal is answered with.
    pub(crate) fn listen(answer: &'static str) -> Result<Self> {
        let interrupts = Self::default();
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for SIGINT and SIGTERM")?;
        let seen = interrupts.signal.clone();
        let listen = move || {
            for signal in signals.forever() {
                if seen.swap(signal, Ordering::SeqCst) != 0 {
                    std::process::exit(exit_code(signal));
                }
                eprintln!("{}: {answer}; once more ends at once", name(signal));
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(listen).context("cannot start a thread")?;
        Ok(interrupts)
    }

    /// The first signal that came.
    pub(crate) fn signal(&self) -> Option<i32> {
        Some(self.signal.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }
}

/// A command that ended before it was done because a signal said so; everything is in order.
#[derive(Debug)]
pub(crate) struct Interrupted {
    signal: i32,
    message: String,
}

impl Interrupted {
    /// Ended by `signal`; `message` says what there is and how to go on.
    pub(crate) fn new(signal: i32, message: String) -> Self {
        Self { signal, message }
    }

    /// 128 + the signal, as a shell says it.
    pub(crate) fn exit_code(&self) -> u8 {
        u8::try_from(exit_code(self.signal)).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Interrupted {}

fn exit_code(signal: i32) -> i32 {
    128 + signal
}

fn name(signal: i32) -> &'static str {
    if signal == SIGTERM { "SIGTERM" } else { "SIGINT" }
}
