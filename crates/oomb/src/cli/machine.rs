//! The machine a command runs on: threads, device, data. It must not know what the command does with them.

use super::prepare::PrepareProgress;
use anyhow::{Context, Result, bail};
use oomb::config::{ComputeDtype, DeviceChoice};
use oomb::data::{Dataset, Source, open_source};
use oomb_device::DType;
use oomb_device::cpu::{Cpu, CpuOptions};

/// Limits the CPU threads of this process; all cores where nothing is said.
pub(crate) fn use_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the CPU threads")
}

/// Opens the device that was asked for.
pub(crate) fn open_device(choice: DeviceChoice, dtype: ComputeDtype) -> Result<Cpu> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => {}
        DeviceChoice::Cuda(_) => bail!("device {choice} is not available: this version runs on the CPU only; use \"cpu\""),
    }
    let compute_dtype = match dtype {
        ComputeDtype::Auto | ComputeDtype::F32 => DType::F32,
        ComputeDtype::Bf16 => DType::Bf16,
    };
    Ok(Cpu::new(CpuOptions { compute_dtype, ..CpuOptions::default() }))
}

/// Opens data, preparing text with progress; `what` is `"training data"`.
pub(crate) fn open_data(source: &Source<'_>, what: &'static str) -> Result<Dataset> {
    let mut progress = PrepareProgress::new(what);
    let dataset = open_source(source, &mut |advance| progress.advance(advance));
    progress.finish();
    Ok(dataset?)
}
