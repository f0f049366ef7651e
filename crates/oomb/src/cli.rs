//! Commands and their arguments. Each module holds one command; they must not know each other.

mod bench;
mod doctor;
mod eval;
mod export;
mod generate;
mod machine;
mod plan;
mod prepare;
mod settings;
mod train;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Train large language models on contexts of a million tokens and more on one GPU.
#[derive(Parser)]
#[command(name = "oomb", version, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage.")]
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
    #[command(subcommand)]
    Bench(bench::Bench),
    Doctor(doctor::Args),
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
        Command::Bench(bench) => bench::run(&bench),
        Command::Doctor(args) => doctor::run(&args),
    }
}

/// An error with its causes, one below the other; a cause that the line above already tells is left out.
pub(crate) fn readable(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(&format!("\n  because: {}", cause.replace('\n', "\n  ")));
        }
    }
    text
}
