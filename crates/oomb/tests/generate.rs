//! Generation against transformers' (scripts/golden_generate.py), for every way of cutting the prompt and placing its pages.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::checkpoint::{Checkpoint, end_tokens};
use oomb::data::Sequence;
use oomb::engine::{Engine, machine};
use oomb::generate::sample::{Sampler, Sampling};
use oomb::generate::{End, Error, Limits, generate};
use oomb::kv::select::Selection;
use oomb::plan::optimizer::StateRequest;
use oomb::plan::{Plan, Request, Tier};
use oomb::schedule;
use oomb_device::cpu::{Cpu, CpuOptions, Delays, Poison, Real};
use oomb_device::{DType, Device};
use serde::Deserialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An entry of generated.json.
#[derive(Deserialize)]
struct Case {
    model: String,
    /// Tokens that a token sees; all where there is none.
    window: Option<usize>,
    prompt: Vec<u32>,
    generated: Vec<u32>,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&std::fs::read(golden("generated.json")).unwrap()).unwrap()
}

/// Pages and chunks in tokens.
#[derive(Debug, Clone, Copy)]
struct Cut {
    page_tokens: usize,
    chunk_tokens: usize,
    group_pages: usize,
    prefetch_groups: usize,
    /// As few pages on the device as there can be.
    tight: bool,
}

const PLAIN: Cut = Cut { page_tokens: 8, chunk_tokens: 128, group_pages: 2, prefetch_groups: 1, tight: false };

const CUTS: [Cut; 6] = [
    PLAIN,
    Cut { page_tokens: 4, chunk_tokens: 4, group_pages: 1, prefetch_groups: 0, tight: true },
    Cut { page_tokens: 4, chunk_tokens: 12, group_pages: 2, prefetch_groups: 1, tight: true },
    Cut { page_tokens: 7, chunk_tokens: 14, group_pages: 2, prefetch_groups: 1, tight: true },
    Cut { page_tokens: 1, chunk_tokens: 5, group_pages: 4, prefetch_groups: 3, tight: true },
    Cut { page_tokens: 64, chunk_tokens: 64, group_pages: 1, prefetch_groups: 2, tight: false },
];

fn engine(model: &str, options: CpuOptions, context: usize, selection: Selection, cut: Cut) -> Engine<Cpu> {
    let checkpoint = Checkpoint::open(&golden(model)).unwrap();
    let device = Cpu::new(CpuOptions { poison: Poison::On, ..options });
    let machine = machine(&device, 1 << 30);
    let mut request = Request {
        model: checkpoint.config().clone(),
        sequence_tokens: context,
        sequences_per_step: 1,
        chunk_tokens: cut.chunk_tokens,
        page_tokens: cut.page_tokens,
        group_pages: cut.group_pages,
        prefetch_groups: cut.prefetch_groups,
        loss_tile_tokens: Some(1),
        keep_budget: None,
        keep_host_budget: None,
        lora: None,
        device_budget: None,
        grad_dtype: DType::F32,
        training: None,
        optimizer_state: StateRequest::default(),
    };
    request.device_budget = cut.tight.then(|| request.smallest_budget(&machine));
    let plan = Plan::new(&request, &machine).unwrap();
    assert!(cut.tight || plan.bytes(Tier::Host) == 0, "{cut:?} keeps its pages on the device");
    let engine = Engine::new(&device, plan, selection).unwrap();
    for (spec, view) in engine.weights.specs.iter().zip(&engine.weights.views) {
        for (name, rows) in &spec.sources {
            device.upload(&mut view.narrow(rows.clone()), checkpoint.tensor(name).unwrap().as_host());
        }
    }
    engine
}

/// Greedy tokens after a prompt.
fn greedy(engine: &mut Engine<Cpu>, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let (mut sampler, mut tokens) = (Sampler::new(Sampling::GREEDY), Vec::new());
    let limits = Limits { max_tokens, stop_tokens: Vec::new() };
    let end = generate(engine, prompt, &mut sampler, &limits, &mut |id| {
        tokens.push(id);
        ControlFlow::Continue(())
    });
    assert_eq!(end.unwrap(), End::Length);
    tokens
}

#[test]
fn greedy_generation_is_that_of_transformers_however_it_is_cut() {
    let cases = cases();
    assert!(cases.iter().filter(|case| case.window.is_some()).count() >= 8 && cases.len() >= 18, "{} cases", cases.len());
    let mut moved = [(0, 0); CUTS.len()];
    for case in cases {
        assert!(case.generated.len() >= 50);
        let selection = case.window.map_or(Selection::All, Selection::Window);
        let context = case.prompt.len() + case.generated.len();
        for (cut, moved) in CUTS.into_iter().zip(&mut moved) {
            let mut engine = engine(&case.model, CpuOptions::default(), context, selection, cut);
            for _ in 0..2 {
                let got = greedy(&mut engine, &case.prompt, case.generated.len());
                assert_eq!(got, case.generated, "{} {selection:?} {cut:?}", case.model);
            }
            let traffic = engine.store.traffic();
            *moved = (moved.0 + traffic.in_bytes, moved.1 + traffic.out_bytes);
        }
    }
    for (cut, (in_bytes, out_bytes)) in CUTS.into_iter().zip(moved) {
        assert_eq!([in_bytes > 0, out_bytes > 0], [cut.tight; 2], "{cut:?} moved {in_bytes} in and {out_bytes} out");
    }
}

/// Slow streams and one that overtakes the other change nothing: every hand-over of a page that grows has its event.
#[test]
fn delays_change_nothing() {
    let case = &cases()[0];
    let context = case.prompt.len() + case.generated.len();
    let micros = Duration::from_micros;
    for (compute, copy_in, copy_out) in [(0, 0, 700), (0, 700, 0), (50, 100, 200)] {
        let delays = Delays { compute: micros(compute), copy_in: micros(copy_in), copy_out: micros(copy_out), seed: 5 };
        let options = CpuOptions { delays: Some(delays), ..CpuOptions::default() };
        let mut engine = engine(&case.model, options, context, Selection::All, CUTS[2]);
        assert_eq!(greedy(&mut engine, &case.prompt, 25), case.generated[..25], "{delays:?}");
    }
}

fn log_softmax(logits: &[f64], id: u32) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits[id as usize] - largest - logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln()
}

/// Logits of one-token steps are those of a pass over the whole prefix, and their losses those of transformers.
#[test]
fn one_token_steps_compute_what_chunks_do() {
    #[derive(Deserialize)]
    struct Run {
        ids: Vec<u32>,
        token_losses: Vec<f64>,
    }
    for model in ["llama", "llama_llama3", "qwen2", "qwen3"] {
        let run: Run = serde_json::from_slice(&std::fs::read(golden(model).join("golden.json")).unwrap()).unwrap();
        for (real, tolerance) in [(Real::F32, 2e-5), (Real::F64, 5e-7)] {
            let options = || CpuOptions { real, ..CpuOptions::default() };
            let tokens = run.ids.len();
            let mut stepped = engine(model, options(), tokens, Selection::All, CUTS[2]);
            let mut whole = engine(model, options(), tokens, Selection::All, CUTS[3]);
            let prefix = |end: usize| Sequence::packed(run.ids[..end].to_vec(), &[0]);
            let mut chunks = stepped.load(&prefix(6), 0);
            for at in 6..tokens {
                let logits = |engine: &mut Engine<Cpu>, chunks: &[_]| {
                    let logits = schedule::predict(engine, chunks).unwrap();
                    assert_eq!(logits.shape(), [1, engine.config.vocab_size]);
                    engine.device.download_f64(&logits).unwrap()
                };
                let got = logits(&mut stepped, &chunks);
                let all = whole.load(&prefix(at), 0);
                let wanted = logits(&mut whole, &all);
                let size = wanted.iter().fold(0.0, |size: f64, logit| size.max(logit.abs()));
                let worst = got.iter().zip(&wanted).fold(0.0, |worst: f64, (got, wanted)| worst.max((got - wanted).abs()));
                assert!(worst <= tolerance * size, "{model} {real:?} after {at} tokens: {worst:e} of {size}");
                let loss = -log_softmax(&got, run.ids[at]);
                let golden = run.token_losses[at - 1];
                assert!((loss - golden).abs() <= tolerance * 5.0, "{model} {real:?} token {at}: {loss} {golden}");
                chunks = vec![stepped.append(run.ids[at], at)];
            }
        }
    }
}

#[test]
fn ends_and_refusals() {
    let case = &cases()[0];
    let context = case.prompt.len() + 5;
    let mut engine = engine(&case.model, CpuOptions::default(), context, Selection::All, PLAIN);
    let mut told = Vec::new();
    let mut run = |prompt: &[u32], max_tokens, stop_tokens: &[u32], enough: usize| {
        told.clear();
        let limits = Limits { max_tokens, stop_tokens: stop_tokens.to_vec() };
        let end = generate(&mut engine, prompt, &mut Sampler::new(Sampling::GREEDY), &limits, &mut |id| {
            told.push(id);
            if told.len() == enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (end, told.clone())
    };
    let (end, told) = run(&case.prompt, 100, &[], 0);
    // The last token of the context predicts one more, which has no room to be read.
    assert_eq!((end.unwrap(), told.as_slice()), (End::Length, &case.generated[..6]));
    let (end, told) = run(&case.prompt, 100, &[99, case.generated[3]], 0);
    let first = case.generated.iter().position(|&id| id == case.generated[3]).unwrap();
    assert_eq!((end.unwrap(), told.as_slice()), (End::StopToken, &case.generated[..first]));
    let (end, told) = run(&case.prompt, 100, &[], 2);
    assert_eq!((end.unwrap(), told.as_slice()), (End::Enough, &case.generated[..2]));
    assert!(matches!(run(&[], 1, &[], 0).0, Err(Error::EmptyPrompt)));
    assert!(matches!(run(&[61], 1, &[], 0).0, Err(Error::OutsideVocabulary { id: 61, vocab_size: 61 })));
    assert!(matches!(run(&vec![0; context + 1], 1, &[], 0).0, Err(Error::PromptTooLong { .. })));
}

#[test]
fn sampled_tokens_depend_on_the_seed_alone() {
    let case = &cases()[0];
    let context = case.prompt.len() + 40;
    let tokens = |cut, seed| {
        let mut engine = engine(&case.model, CpuOptions::default(), context, Selection::All, cut);
        let mut sampler = Sampler::new(Sampling { temperature: 1.5, top_k: 20, top_p: 0.95, seed });
        let (mut told, limits) = (Vec::new(), Limits { max_tokens: 40, stop_tokens: Vec::new() });
        generate(&mut engine, &case.prompt, &mut sampler, &limits, &mut |id| {
            told.push(id);
            ControlFlow::Continue(())
        })
        .unwrap();
        told
    };
    assert_eq!(tokens(PLAIN, 1), tokens(PLAIN, 1));
    assert_ne!(tokens(PLAIN, 1), tokens(PLAIN, 2));
}

#[test]
fn end_tokens_are_read_as_transformers_writes_them() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    assert_eq!(end_tokens(folder.path()).unwrap(), [0; 0]);
    write("config.json", r#"{"eos_token_id": 7}"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [7]);
    write("generation_config.json", r#"{"eos_token_id": null}"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [7]);
    write("generation_config.json", r#"{"eos_token_id": [3, 4]}"#);
    assert_eq!(end_tokens(folder.path()).unwrap(), [3, 4]);
    for wrong in [r#"{"eos_token_id": "</s>"}"#, r#"{"eos_token_id": [-1]}"#, "{"] {
        write("generation_config.json", wrong);
        let message = end_tokens(folder.path()).unwrap_err().to_string();
        assert!(message.contains("generation_config.json"), "{message}");
    }
}
