//! Commands and their arguments. Each module holds one command; they must not know each other.

mod bench;
mod completions;
mod data_report;
mod doctor;
mod eval;
mod export;
mod generate;
mod interrupt;
mod machine;
mod man;
mod plan;
mod prepare;
mod report;
mod settings;
mod train;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Train large language models on contexts of a million tokens and more on one GPU.
#[derive(Parser)]
#[command(name = "oomb", version, max_term_width = 100)]
#[command(after_help = "A first run, from a novel to a model and its report:
  oomb train --config configs/emma.toml
  oomb eval --model runs/emma/model --data data/emma.txt --tokenizer bytes --sequence-tokens 32K
  oomb report runs/emma

`oomb COMMAND --help` shows examples. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 and 143 interrupted by
SIGINT and SIGTERM, with everything saved.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Prepare(prepare::Args),
    Plan(plan::Args),
    Train(train::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Export(export::Args),
    Report(report::Args),
    #[command(subcommand)]
    Bench(bench::Bench),
    Doctor(doctor::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// Runs a command.
pub(crate) fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Prepare(args) => prepare::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Bench(bench) => bench::run(&bench),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => completions::run(&args, Cli::command()),
        Command::Man(args) => man::run(&args, Cli::command()),
    }
}

/// What to say of a command that did not end well, and its exit code.
pub(crate) fn verdict(error: &anyhow::Error) -> (String, ExitCode) {
    match error.downcast_ref::<interrupt::Interrupted>() {
        Some(interrupted) => (interrupted.to_string(), ExitCode::from(interrupted.exit_code())),
        None => (format!("error: {}", readable(error)), ExitCode::FAILURE),
    }
}

/// An error with its causes, one below the other; a cause that the line above already tells is left out.
fn readable(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(&format!("\n  because: {}", cause.replace('\n', "\n  ")));
        }
    }
    text
}
