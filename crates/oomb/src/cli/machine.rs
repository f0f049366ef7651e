//! The machine a command runs on: threads, device, data. It must not know what the command does with them.

use super::prepare::PrepareProgress;
use anyhow::{Context, Result};
use oomb::config::{ComputeDtype, DataSettings, DeviceChoice, ModelSettings};
use oomb::data::{Cutting, Dataset, Source, open_source};
use oomb::metrics::Loading;
use oomb::run::ModelFiles;
use oomb_device::DType;
use oomb_device::cpu::{Cpu, CpuOptions};
use oomb_device::cuda::Cuda;

/// Limits the CPU threads of this process; all cores where nothing is said.
pub(crate) fn use_threads(threads: Option<usize>) -> Result<()> {
    let Some(threads) = threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the CPU threads")
}

/// A device of either backend.
pub(crate) enum Opened {
    Cpu(Cpu),
    Cuda(Cuda),
}

/// Opens the device that was asked for; `auto` is the first GPU, or else the CPU with a note that says why.
pub(crate) fn open_device(choice: DeviceChoice, dtype: ComputeDtype) -> Result<Opened> {
    let compute_dtype = match dtype {
        ComputeDtype::Auto | ComputeDtype::F32 => DType::F32,
        ComputeDtype::Bf16 => DType::Bf16,
    };
    let cpu = || Opened::Cpu(Cpu::new(CpuOptions { compute_dtype, ..CpuOptions::default() }));
    match choice {
        DeviceChoice::Cpu => Ok(cpu()),
        DeviceChoice::Cuda(index) => Ok(Opened::Cuda(Cuda::new(index)?)),
        // f32 is for the CPU alone.
        DeviceChoice::Auto if dtype == ComputeDtype::F32 => Ok(cpu()),
        DeviceChoice::Auto => Ok(Cuda::new(0).map_or_else(
            |error| {
                eprintln!("note: running on the CPU: {error}");
                cpu()
            },
            Opened::Cuda,
        )),
    }
}

/// The same for a command without a configuration: activations are of the type that the device is best at.
pub(crate) fn open_default(choice: DeviceChoice) -> Result<Opened> {
    open_device(choice, ComputeDtype::Auto)
}

/// Runs an expression on whichever device was opened; the expression is compiled once for each backend.
macro_rules! on_device {
    ($opened:expr, |$device:ident| $body:expr) => {
        match $opened {
            $crate::cli::machine::Opened::Cpu($device) => $body,
            $crate::cli::machine::Opened::Cuda($device) => $body,
        }
    };
}
pub(crate) use on_device;

/// Opens data, preparing text with progress; `what` is `"training data"`.
pub(crate) fn open_data(source: &Source<'_>, what: &'static str) -> Result<Dataset> {
    let mut progress = PrepareProgress::new(what);
    let dataset = open_source(source, &mut |advance| progress.advance(advance));
    progress.finish();
    Ok(dataset?)
}

/// How a configuration cuts documents into sequences.
pub(crate) fn cutting(data: &DataSettings) -> Cutting {
    let (sequence_tokens, packing, long_documents) = (data.sequence_tokens, data.packing, data.long_documents);
    Cutting { sequence_tokens, packing, long_documents }
}

/// Opens a model; where loading its weights takes more than a moment, it shows.
pub(crate) fn open_model(settings: &ModelSettings) -> Result<ModelFiles> {
    let shown = Loading::new();
    Ok(ModelFiles::open(settings)?.with_loading(Box::new(move |done, total| shown.show(done, total))))
}
