//! `oomb doctor`: what this machine has, and whether its device computes what it should.

use super::machine::{on_device, open_default};
use anyhow::{Result, bail};
use clap::Args as ClapArgs;
use oomb::bench::aligned;
use oomb::config::{Bytes, DeviceChoice};
use oomb::doctor::{Comparison, Facts, Problem, cases, compare};
use oomb_device::Backend;
use oomb_device::cuda::Survey;
use std::path::Path;
use std::time::Instant;

/// Look at this machine, say what is wrong and what to do, and compare every op of its device with the CPU.
///
/// Looks at memory and its limits, disk, driver, GPUs, and CUDA's libraries with every place that is searched for them.
///
/// A GPU stores bf16: each result may be twice as far from the exact one (the CPU in f64) as the CPU's own bf16 result is,
/// plus a floor for sums in another order. Without a GPU the CPU's f32 is checked against its f64. Takes less than a minute;
/// ends with exit code 1 if something is wrong.
#[derive(ClapArgs)]
#[command(after_help = "Examples:
  oomb doctor
  oomb doctor --no-test
  oomb doctor --device cuda:1 --all")]
pub(crate) struct Args {
    /// "auto" (a GPU if there is one), "cpu", "cuda:0"
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Print every comparison, not only the worst of each output
    #[arg(long)]
    all: bool,
    /// Only look; compute nothing
    #[arg(long, conflicts_with = "all")]
    no_test: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let facts = Facts::of_this_machine(Path::new("."));
    println!("{}{}", machine(&facts), problems(&facts));
    if args.no_test {
        return Ok(());
    }
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

/// What the machine has, line by line.
fn machine(facts: &Facts) -> String {
    let mut lines = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    lines.push(("processor", format!("{} threads for this process", facts.threads)));
    lines.push((
        "memory",
        match &facts.memory {
            Ok((total, available)) => format!("{} available of {}", Bytes(*available), Bytes(*total)),
            Err(why) => format!("unknown: {why}"),
        },
    ));
    if let Some((limit, free)) = facts.control_group {
        lines.push(("", format!("the control group allows {}, of which {} are free", Bytes(limit), Bytes(free))));
    }
    lines.push((
        "",
        match facts.memlock {
            Some(limit) => format!("at most {} locked (ulimit -l)", Bytes(limit)),
            None => "no limit on locked memory".to_owned(),
        },
    ));
    let (folder, free, _) = &facts.disk;
    let free = free.as_ref().map_or_else(|_| "unknown".to_owned(), |bytes| Bytes(*bytes).to_string());
    lines.push(("disk", format!("{free} free in {}", folder.display())));
    lines.extend(cuda(&facts.cuda));
    lines.iter().map(|(name, text)| format!("{name:10} {text}\n")).collect()
}

/// Driver, GPUs, libraries, and where they were looked for.
fn cuda(survey: &Survey) -> Vec<(&'static str, String)> {
    let module = survey.kernel_module.as_ref().map_or_else(String::new, |version| format!(" (kernel module {version})"));
    let mut lines = vec![(
        "driver",
        match &survey.driver {
            Ok((major, minor)) => format!("CUDA {major}.{minor}{module}"),
            Err(_) => format!("not usable{module}"),
        },
    )];
    for (ordinal, gpu) in survey.gpus.iter().enumerate() {
        let ((major, minor), memory) = (gpu.capability, Bytes(gpu.memory_bytes));
        lines.push(("gpu", format!("cuda:{ordinal}  {}, {memory}, compute capability {major}.{minor}", gpu.name)));
    }
    if survey.gpus.is_empty() {
        lines.push(("gpu", format!("none ({} NVIDIA on the PCI bus)", survey.num_pci)));
    }
    for (index, library) in survey.libraries.iter().enumerate() {
        let found = library.found.as_ref().map_or_else(|_| "not found".to_owned(), |path| path.display().to_string());
        lines.push((if index == 0 { "libraries" } else { "" }, format!("{:12} {found}", library.name)));
    }
    for (index, (name, value)) in survey.variables.iter().enumerate() {
        let value = value.as_deref().unwrap_or("not set");
        lines.push((if index == 0 { "searched" } else { "" }, format!("{name} {value}")));
    }
    lines.extend(survey.folders.iter().map(|folder| ("", folder.display().to_string())));
    lines
}

/// Each problem with what to do about it.
fn problems(facts: &Facts) -> String {
    let told = |problem: &Problem| format!("\n! {}\n  {}\n", problem.what, problem.remedy);
    facts.problems().iter().map(told).collect()
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
