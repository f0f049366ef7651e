//! The `oomb` command: arguments in, text and exit code out. It must not compute: every command is a few calls to the
//! library.
#![forbid(unsafe_code)]

mod cli;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let command = cli::Cli::parse();
    match cli::run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (text, code) = cli::verdict(&error);
            eprintln!("{text}");
            code
        }
    }
}
