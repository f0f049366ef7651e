//! `oomb completions`: what a shell needs to complete commands and options.

use anyhow::Result;
use clap::{Args as ClapArgs, Command};
use clap_complete::{Shell, generate};
use std::io;

/// Print completions for a shell.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb completions bash > ~/.local/share/bash-completion/completions/oomb
  oomb completions zsh > ~/.zfunc/_oomb                    # a folder of $fpath
  oomb completions fish > ~/.config/fish/completions/oomb.fish")]
pub(crate) struct Args {
    /// The shell
    shell: Shell,
}

/// Runs the command.
pub(crate) fn run(args: &Args, mut command: Command) -> Result<()> {
    let mut text = Vec::new();
    generate(args.shell, &mut command, "oomb", &mut text);
    io::Write::write_all(&mut io::stdout(), &text)?;
    Ok(())
}
