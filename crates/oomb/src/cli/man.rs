//! `oomb man`: manual pages, from the same source as `--help`.

use anyhow::{Context, Result};
use clap::{Args as ClapArgs, Command};
use clap_mangen::{Man, generate_to};
use std::fs;
use std::io;
use std::path::PathBuf;

/// Print the manual page, or write the pages of all commands.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb man | man -l -
  oomb man --out ~/.local/share/man/man1      # then `man oomb-train`")]
pub(crate) struct Args {
    /// Folder for a page of each command; made if it is not there
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &Args, command: Command) -> Result<()> {
    let Some(folder) = &args.out else {
        Man::new(command).render(&mut io::stdout())?;
        return Ok(());
    };
    let context = || format!("cannot write manual pages to {}", folder.display());
    fs::create_dir_all(folder).with_context(context)?;
    generate_to(command, folder).with_context(context)?;
    println!("manual pages in {}", folder.display());
    Ok(())
}
