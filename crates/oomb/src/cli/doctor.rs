//! `oomb doctor`: what this machine has, and whether its device computes what it should.

use super::machine::{on_device, open_default};
use anyhow::{Result, bail};
use clap::Args as ClapArgs;
use oomb::bench::aligned;
use oomb::config::{Bytes, DeviceChoice};
use oomb::doctor::{Comparison, cases, compare};
use oomb_device::Backend;
use std::time::Instant;

/// Look at this machine, and compare every op of its device with the CPU.
///
/// A GPU stores bf16: each result may be twice as far from the exact one (the CPU in f64) as the CPU's own bf16 result is,
/// plus a floor for sums in another order. Without a GPU the CPU's f32 is checked against its f64. Takes less than a minute;
/// ends with exit code 1 if something is wrong.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb doctor
  oomb doctor --device cuda:1 --all")]
pub(crate) struct Args {
    /// "auto" (a GPU if there is one), "cpu", "cuda:0"
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Print every comparison, not only the worst of each output
    #[arg(long)]
    all: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    print!("{}", machine());
    on_device!(open_default(args.device)?, |device| args.run_on(&device))
}

impl Args {
    fn run_on<B: Backend>(&self, device: &B) -> Result<()> {
        let (total, free) = device.memory();
        println!("device     {} ({}), {} of {} free", device.name(), device.hardware(), Bytes(free), Bytes(total));
        if device.name() == "cpu" {
            println!("           no GPU in use: the CPU in f32 is compared with the CPU in f64");
        }
        let started = Instant::now();
        let comparisons = compare(device, &cases())?;
        println!("\n{}", table(&comparisons, self.all));
        let wrong: Vec<_> = comparisons.iter().filter(|comparison| !comparison.is_fine()).collect();
        let seconds = started.elapsed().as_secs_f64();
        println!("{} comparisons in {seconds:.1} s, {} wrong", comparisons.len(), wrong.len());
        if wrong.is_empty() {
            return Ok(());
        }
        let mut ops: Vec<_> = wrong.iter().map(|comparison| comparison.op).collect();
        ops.dedup();
        bail!(
            "{} does not compute what it should in {}\ndo not train on it: run with --device cpu, or on another GPU; update the \
             driver and try again, and if it stays, report this table",
            device.name(),
            ops.join(", ")
        )
    }
}

/// Processor and memory, with what limits them.
fn machine() -> String {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut text = format!("version    {}\nprocessor  {threads} threads for this process\n", env!("CARGO_PKG_VERSION"));
    if threads < 4 {
        text.push_str("           few for a GPU: one thread launches, others convert and copy; 4 or more are better\n");
    }
    let mut system = match sysinfo::System::new() {
        Ok(system) => system,
        Err(e) => return text + &format!("memory     unknown: {e}\n"),
    };
    system.refresh_memory();
    let (total, available) = (system.total_memory(), system.available_memory());
    text.push_str(&format!("memory     {} available of {}\n", Bytes(available), Bytes(total)));
    if let Some(limits) = system.cgroup_limits().filter(|limits| limits.total_memory < total) {
        let (limit, free) = (Bytes(limits.total_memory), Bytes(limits.free_memory));
        text.push_str(&format!("           this process's control group allows {limit}, of which {free} are free: pages that\n"));
        text.push_str("           do not fit the device are held there; raise the container's memory for longer contexts\n");
    }
    text
}

fn table(comparisons: &[Comparison], all: bool) -> String {
    let shown: Vec<&Comparison> = if all { comparisons.iter().collect() } else { worst(comparisons) };
    let heading = ["op", "output", "worst size", "error", "allowed", "verdict"].map(str::to_owned);
    let line = |comparison: &&Comparison| {
        let verdict = if comparison.is_fine() { "ok" } else { "WRONG" };
        [
            comparison.op.to_owned(),
            comparison.output.to_owned(),
            comparison.size.clone(),
            format!("{:.1e}", comparison.error),
            format!("{:.1e}", comparison.allowed),
            verdict.to_owned(),
        ]
    };
    let lines: Vec<_> = std::iter::once(heading).chain(shown.iter().map(line)).collect();
    aligned(&lines, 3)
}

/// Of each op's each output the size at which it is closest to its limit, or furthest beyond.
fn worst(comparisons: &[Comparison]) -> Vec<&Comparison> {
    let badness = |comparison: &Comparison| {
        // An exact result where none but an exact one is allowed has no ratio.
        let ratio = if comparison.error == 0.0 { 0.0 } else { comparison.error / comparison.allowed };
        if ratio.is_nan() { f64::INFINITY } else { ratio }
    };
    let mut worst: Vec<&Comparison> = Vec::new();
    for comparison in comparisons {
        let same = |known: &&mut &Comparison| known.op == comparison.op && known.output == comparison.output;
        match worst.iter_mut().find(same) {
            Some(known) if badness(comparison) > badness(known) => *known = comparison,
            Some(_) => {}
            None => worst.push(comparison),
        }
    }
    worst
}
