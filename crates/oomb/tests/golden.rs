//! Parity with transformers and PEFT: loss and every parameter's gradient of each golden model and golden adapter
//! (scripts/golden.py, scripts/golden_lora.py), for every way of cutting the sequence.

use oomb::checkpoint::{Adapter, Checkpoint};
use oomb::data::Sequence;
use oomb::engine::{Engine, machine};
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::plan::optimizer::StateRequest;
use oomb::plan::{Plan, Request, Training};
use oomb::train;
use oomb_device::cpu::{Cpu, CpuOptions, Poison, Real};
use oomb_device::cuda::Cuda;
use oomb_device::{Backend, DType};
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What transformers computed for a golden model.
struct Golden {
    name: &'static str,
    checkpoint: Checkpoint,
    adapter: Option<Adapter>,
    sequence: Sequence,
    run: Run,
    /// By tensor name.
    grads: BTreeMap<String, Vec<f32>>,
}

/// golden.json.
#[derive(Deserialize)]
struct Run {
    ids: Vec<u32>,
    /// Lengths.
    documents: Vec<usize>,
    loss: f64,
    /// In order, for the tokens that have a label.
    token_losses: Vec<f64>,
}

fn golden(name: &'static str) -> Golden {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let run: Run = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).expect("golden.json")).expect("its fields");
    let starts: Vec<usize> = run
        .documents
        .iter()
        .scan(0, |end, length| {
            *end += length;
            Some(*end - length)
        })
        .collect();
    let sequence = Sequence::packed(run.ids.clone(), &starts);
    let (checkpoint, grads) = (Checkpoint::open(&folder).expect("a golden checkpoint"), golden_gradients(&folder));
    Golden { name, checkpoint, adapter: None, sequence, run, grads }
}

fn golden_gradients(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(folder.join("grads.safetensors")).expect("grads.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("valid safetensors");
    let floats = |data: &[u8]| data.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect();
    file.iter().map(|(name, view)| (name.to_owned(), floats(view.data()))).collect()
}

/// The golden model with the golden adapter of that name.
fn golden_lora(name: &'static str) -> Golden {
    /// Its golden.json; the rest is the model's.
    #[derive(Deserialize)]
    struct Losses {
        loss: f64,
        token_losses: Vec<f64>,
    }
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_lora").join(name);
    let base = golden(name);
    let adapter = Some(Adapter::open(&folder, base.checkpoint.config()).expect("a golden adapter"));
    let losses = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).expect("golden.json"));
    let Losses { loss, token_losses } = losses.expect("its fields");
    Golden { adapter, run: Run { loss, token_losses, ..base.run }, grads: golden_gradients(&folder), ..base }
}

/// How the sequence is cut and where its pages are.
#[derive(Debug, Clone, Copy)]
struct Cut {
    page_tokens: usize,
    chunk_tokens: usize,
    group_pages: usize,
    loss_tile_tokens: usize,
    keep: Keep,
    /// As few pages on the device as the schedule can do with.
    tight: bool,
}

fn cpu(real: Real, compute_dtype: DType) -> Cpu {
    Cpu::new(CpuOptions { real, compute_dtype, poison: Poison::On, ..CpuOptions::default() })
}

fn engine<B: Backend>(golden: &Golden, device: &B, cut: Cut) -> Engine<B> {
    let machine = machine(device, 1 << 30);
    let mut request = Request {
        model: golden.checkpoint.config().clone(),
        sequence_tokens: golden.sequence.ids.len(),
        sequences_per_step: 1,
        chunk_tokens: cut.chunk_tokens,
        page_tokens: cut.page_tokens,
        group_pages: cut.group_pages,
        prefetch_groups: 1,
        loss_tile_tokens: Some(cut.loss_tile_tokens),
        device_budget: None,
        keep_budget: None,
        keep_host_budget: None,
        grad_dtype: DType::F32,
        lora: golden.adapter.as_ref().map(|adapter| adapter.lora().clone()),
        training: Some(Training { keep: Some(cut.keep), optimizer: false }),
        optimizer_state: StateRequest::default(),
    };
    request.device_budget = cut.tight.then(|| request.smallest_budget(&machine));
    let plan = Plan::new(&request, &machine).expect("a golden model fits anywhere");
    let engine = Engine::new(device, plan, Selection::All).expect("enough memory for a golden model");
    for (spec, view) in engine.weights.specs.iter().zip(&engine.weights.views) {
        for (name, rows) in &spec.sources {
            let values = golden.checkpoint.tensor(name).expect("a golden tensor");
            device.upload(&mut view.narrow(rows.clone()), values.as_host());
        }
    }
    for (adapter, params) in golden.adapter.iter().zip(&engine.adapter) {
        for (spec, view) in params.specs.iter().zip(&params.views) {
            device.upload(&mut view.clone(), adapter.tensor(&spec.sources[0].0).expect("a golden factor").as_host());
        }
    }
    engine
}

/// The largest deviation of a tensor, relative to the largest element that was wanted.
fn deviation(got: &[f64], wanted: impl Iterator<Item = f64> + Clone) -> f64 {
    let size = wanted.clone().fold(0.0, |size: f64, value| size.max(value.abs()));
    let worst = got.iter().zip(wanted).fold(0.0, |worst: f64, (got, wanted)| {
        let difference = (got - wanted).abs();
        if difference.is_nan() { f64::INFINITY } else { worst.max(difference) }
    });
    worst / size
}

/// Runs `golden` cut in this way and adds what is off by more than `tolerance` to `failures`.
fn check(golden: &Golden, real: Real, cut: Cut, tolerance: f64, failures: &mut Vec<String>) {
    let mut engine = engine(golden, &cpu(real, DType::F32), cut);
    let step = train::gradient(&mut engine, std::slice::from_ref(&golden.sequence), 0).expect("the CPU does not fail");
    let mut expect = |what: &str, deviation: f64| {
        if deviation.is_nan() || deviation > tolerance {
            failures.push(format!("{} {real:?} {cut:?}: {what} is off by {deviation:.2e}", golden.name));
        }
    };
    expect("loss", (step.loss / golden.run.loss - 1.0).abs());
    let losses = engine.download_losses(0, golden.sequence.ids.len()).expect("the CPU does not fail");
    let labelled: Vec<f64> = losses
        .iter()
        .zip(&golden.sequence.labels)
        .filter(|(_, label)| **label != oomb_device::ops::loss::IGNORE)
        .map(|(loss, _)| *loss)
        .collect();
    assert_eq!(labelled.len(), golden.run.token_losses.len());
    expect("a token's loss", deviation(&labelled, golden.run.token_losses.iter().copied()));
    for (name, got) in gradients(golden, &engine) {
        expect(&name, deviation(&got, golden.grads[&name].iter().map(|&value| f64::from(value))));
    }
}

/// The gradient of every parameter, by the name of its golden tensor.
fn gradients<B: Backend>(golden: &Golden, engine: &Engine<B>) -> BTreeMap<String, Vec<f64>> {
    let grads = engine.grads.as_ref().expect("an engine for training");
    let mut found = BTreeMap::new();
    for (spec, view) in grads.specs.iter().zip(&grads.views) {
        for (name, rows) in &spec.sources {
            let got = engine.device.download_f64(&view.narrow(rows.clone())).expect("the device does not fail");
            assert_eq!(got.len(), golden.grads[name].len(), "{name}");
            found.insert(name.clone(), got);
        }
    }
    assert_eq!(found.len(), golden.grads.len(), "{}: gradients without a parameter", golden.name);
    found
}

/// Pages of 4 and chunks from one page to beyond the 37 tokens, odd numbers of pages included; then longer pages, the
/// whole sequence in one. The rest changes along.
fn cuts() -> Vec<Cut> {
    let keeps = [Keep::Inputs, Keep::Attention, Keep::All];
    let sizes = [(4, 4), (4, 8), (4, 12), (4, 20), (4, 36), (4, 40), (16, 16), (16, 48), (64, 64)];
    let mut cuts = Vec::new();
    for (i, (page_tokens, chunk_tokens)) in sizes.into_iter().enumerate() {
        for tight in [false, true] {
            cuts.push(Cut {
                page_tokens,
                chunk_tokens,
                group_pages: [1, 2, 4][i % 3],
                loss_tile_tokens: [3, 8, 64][(i / 3 + i) % 3],
                keep: keeps[(i + usize::from(tight)) % 3],
                tight,
            });
        }
    }
    cuts
}

/// transformers in f32 is itself off by up to 7.9e-6 from its f64 result (llama_tied, layer 0's input norm), this by up to
/// 1.3e-5 there and 5.8e-6 elsewhere: two and a half times the former.
const F32_TOLERANCE: f64 = 2e-5;
/// In f64 what remains are the golden gradients' own rounding to f32 and the factors that are f32 in any case (1/labels,
/// 1/sqrt(Dh), the norms' epsilon): measured up to 1.7e-7.
const F64_TOLERANCE: f64 = 5e-7;
/// An adapter's alpha / √r is one more f32 factor, which moves attention's scores: measured up to 8.2e-7. Where it is exact, the
/// tolerance is the other one.
const F64_TOLERANCE_INEXACT_SCALE: f64 = 1.5e-6;

fn check_all(golden: &Golden, f64_tolerance: f64) {
    let mut failures = Vec::new();
    for cut in cuts() {
        check(golden, Real::F32, cut, F32_TOLERANCE, &mut failures);
    }
    for cut in cuts().into_iter().step_by(5) {
        check(golden, Real::F64, cut, f64_tolerance, &mut failures);
    }
    let shown = failures.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} deviations from transformers:\n{shown}", failures.len());
}

macro_rules! parity {
    ($($name:ident),*) => {$(
        #[test]
        fn $name() {
            check_all(&golden(stringify!($name)), F64_TOLERANCE);
        }
    )*};
}

#[test]
fn lora_all_linear() {
    check_all(&golden_lora("llama"), F64_TOLERANCE);
}

/// Rank-stabilised, beside biases and a tied head.
#[test]
fn lora_rslora() {
    check_all(&golden_lora("qwen2"), F64_TOLERANCE_INEXACT_SCALE);
}

/// Rank 1, beside frozen QK norms, in packed documents.
#[test]
fn lora_packed() {
    check_all(&golden_lora("qwen3_packed"), F64_TOLERANCE);
}

#[test]
fn lora_wide() {
    check_all(&golden_lora("llama_wide"), F64_TOLERANCE);
}

parity!(
    llama,
    llama_tied,
    llama_linear,
    llama_dynamic,
    llama_llama3,
    llama_yarn,
    qwen2,
    qwen3,
    qwen3_packed,
    llama_wide,
    qwen3_wide
);

/// Distance of all gradients together from transformers', relative to their size.
fn gradient_error(golden: &Golden, got: &BTreeMap<String, Vec<f64>>) -> f64 {
    let pairs = || got.iter().flat_map(|(name, got)| got.iter().zip(&golden.grads[name]));
    let error: f64 = pairs().map(|(got, &wanted)| (got - f64::from(wanted)).powi(2)).sum();
    let size: f64 = pairs().map(|(_, &wanted)| f64::from(wanted).powi(2)).sum();
    (error / size).sqrt()
}

/// On a GPU: as near to transformers as the CPU is in bf16, for the models whose head dim its attention kernels take.
#[test]
fn a_gpu_agrees() {
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(error) => {
            eprintln!("skipped: no CUDA device: {error}");
            return;
        }
    };
    fn outcome<B: Backend>(golden: &Golden, device: &B, cut: Cut) -> (f64, f64) {
        let mut engine = engine(golden, device, cut);
        let step = train::gradient(&mut engine, std::slice::from_ref(&golden.sequence), 0).expect("the device does not fail");
        ((step.loss / golden.run.loss - 1.0).abs(), gradient_error(golden, &gradients(golden, &engine)))
    }
    for golden in [golden("llama_wide"), golden("qwen3_wide"), golden_lora("llama_wide")] {
        let name = if golden.adapter.is_some() { format!("{} with an adapter", golden.name) } else { golden.name.to_owned() };
        for (page_tokens, chunk_tokens, keep, tight) in [
            (64, 64, Keep::Inputs, true),
            (64, 128, Keep::All, false),
            (128, 128, Keep::Attention, true),
            (128, 256, Keep::All, false),
        ] {
            let cut = Cut { page_tokens, chunk_tokens, group_pages: 1, loss_tile_tokens: 64, keep, tight };
            let (loss, gradient) = outcome(&golden, &cuda, cut);
            let (bf16_loss, bf16_gradient) = outcome(&golden, &cpu(Real::F32, DType::Bf16), cut);
            println!(
                "{name} {cut:?}: loss {loss:.1e} (CPU in bf16 {bf16_loss:.1e}), gradient {gradient:.1e} ({bf16_gradient:.1e})"
            );
            assert!(gradient <= 2.0 * bf16_gradient, "{name} {cut:?}: {gradient} {bf16_gradient}");
            // The mean over some 150 labels of logits that are rounded to bf16.
            assert!(loss < 4e-3, "{name} {cut:?}: {loss}");
        }
    }
}

#[test]
fn every_golden_model_is_checked() {
    let checked = [
        "llama",
        "llama_tied",
        "llama_linear",
        "llama_dynamic",
        "llama_llama3",
        "llama_yarn",
        "qwen2",
        "qwen3",
        "qwen3_packed",
        "llama_wide",
        "qwen3_wide",
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(!path.is_dir() || checked.contains(&name.as_str()), "nothing compares with {name}");
    }
}
