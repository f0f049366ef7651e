//! `oomb report`: runs as one HTML page.

use anyhow::Result;
use clap::Args as ClapArgs;
use oomb::report::{self, REPORT_FILE};
use std::path::PathBuf;

/// Show a run, or several side by side, as one HTML page that opens without a server and without a network.
///
/// Curves of loss, gradient norm, learning rate and throughput, memory by tier, loss by position where the run's folder holds
/// an eval.json, the plan, the configuration; of several runs the settings that differ. `oomb train` writes the page of its
/// run at its end; of a run that is still going, this makes the page of the steps so far.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb report runs/emma                                        # runs/emma/report.html
  oomb report runs/emma runs/second --out comparison.html      # overlaid, with the settings that differ
  oomb report metrics.jsonl --out curve.html                   # the steps alone, without their folder")]
pub(crate) struct Args {
    /// Folders of runs (run.out of their configurations), or metrics.jsonl files
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page; report.html in the run's folder where nothing is said, of several runs in the present one
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let beside = match args.runs.as_slice() {
        [run] if run.is_dir() => run.join(REPORT_FILE),
        _ => PathBuf::from(REPORT_FILE),
    };
    let out = args.out.clone().unwrap_or(beside);
    report::write(&args.runs, &out)?;
    println!("{}", out.display());
    Ok(())
}
