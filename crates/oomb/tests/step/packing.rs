//! Documents that share a sequence: none changes another, and together they are what they are alone.

use crate::common::*;
use oomb::config::{LongDocuments, Packing, RowSettings, TokenizerSource};
use oomb::data::{Cutting, Dataset, Existing, PrepareRequest, Reading, Sequence, Tokenizer, Windows, prepare};
use oomb::engine::Engine;
use oomb::kv::select::Selection;
use oomb::model::activations::Keep;
use oomb::model::config::{Family, ModelConfig};
use oomb_device::cpu::{Cpu, Real};

const VOCAB: usize = 37;

/// A document's tokens.
fn document(random: &mut Random, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| random.below(VOCAB) as u32).collect()
}

/// Documents in one sequence, labels in document `labelled` alone.
fn packed(documents: &[&[u32]], labelled: usize) -> Sequence {
    let mut starts = vec![0];
    for document in documents {
        starts.push(starts.last().expect("one is there") + document.len());
    }
    let trained: Vec<bool> =
        documents.iter().enumerate().flat_map(|(index, document)| vec![index == labelled; document.len()]).collect();
    Sequence::packed(documents.concat(), &starts[..documents.len()]).masked(&trained)
}

/// Losses of the tokens, and all gradients.
fn step(engine: &mut Engine<Cpu>, sequence: &Sequence) -> (Vec<f64>, Vec<f64>) {
    let outcome = outcome(engine, std::slice::from_ref(sequence));
    (engine.download_losses(0, sequence.ids.len()).expect("the CPU does not fail"), outcome.grads)
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Chunks and pages end within documents; pages move to the host and back.
fn setting(keep: Keep) -> Setting {
    Setting { chunk_tokens: 8, keep, frames: Some(0), group_pages: 1, ..Setting::default() }
}

#[test]
fn a_document_does_not_change_another_by_a_bit() {
    let mut random = Random::fresh("a_document_does_not_change_another_by_a_bit");
    for (family, keep) in [(Family::Llama, Keep::All), (Family::Qwen2, Keep::Inputs), (Family::Qwen3, Keep::Attention)] {
        let model = model(family);
        let device = cpu(Real::F32);
        let request = request(&model, setting(keep), 60, 1);
        let mut engine = engine(&device, &request, Some(0), Selection::All, random.bits());
        for (before, own, after) in [(13, 19, 11), (1, 30, 7), (24, 9, 27)] {
            let own = document(&mut random, own);
            let run = |engine: &mut Engine<Cpu>, random: &mut Random| {
                let (first, last) = (document(random, before), document(random, after));
                let (losses, grads) = step(engine, &packed(&[&first, &own, &last], 1));
                (bits(&losses[before..before + own.len()]), bits(&grads))
            };
            let (once, again) = (run(&mut engine, &mut random), run(&mut engine, &mut random));
            assert!(once.0.iter().filter(|&&loss| f64::from_bits(loss) > 0.0).count() == own.len() - 1, "{once:?}");
            assert_eq!(once.0, again.0, "{family:?}: losses");
            assert!(once.1 == again.1, "{family:?}: gradients");
        }
    }
}

/// The test above fails where documents see each other.
#[test]
fn documents_that_see_each_other_do_change() {
    let mut random = Random::fresh("documents_that_see_each_other_do_change");
    let device = cpu(Real::F32);
    let request = request(&model(Family::Llama), setting(Keep::All), 60, 1);
    let mut engine = engine(&device, &request, Some(0), Selection::All, random.bits());
    let own = document(&mut random, 19);
    let mut run = |random: &mut Random| {
        let mut sequence = packed(&[&document(random, 13), &own], 1);
        sequence.first.fill(0);
        step(&mut engine, &sequence)
    };
    assert_ne!(run(&mut random).0[13..], run(&mut random).0[13..]);
}

/// A prepared folder of texts; byte tokens.
fn prepared(folder: &std::path::Path, texts: &[String]) -> Dataset {
    let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
    let file = folder.join("texts.jsonl");
    std::fs::write(&file, lines.join("\n")).expect("a writable folder");
    let tokenizer = Tokenizer::load(&TokenizerSource::Bytes).expect("always there");
    let reading = Reading::load(&RowSettings::default(), &tokenizer).expect("text needs nothing");
    let (inputs, out) = ([file], folder.join("out"));
    let request =
        PrepareRequest { inputs: &inputs, out: &out, tokenizer: &tokenizer, reading: &reading, existing: Existing::Keep };
    prepare(&request, &mut |_| {}).expect("good text").into_dataset()
}

fn sequences(folder: &std::path::Path, packing: Packing) -> Vec<Sequence> {
    let dataset = Dataset::open(&folder.join("out")).expect("just prepared");
    let cutting = Cutting { sequence_tokens: 48, packing, long_documents: LongDocuments::Auto };
    let windows = Windows::cut(dataset, cutting).expect("documents that fit");
    (0..windows.len()).map(|index| windows.get(index).expect("a readable folder")).collect()
}

#[test]
fn packed_is_unpacked_to_rounding() {
    let mut random = Random::fresh("packed_is_unpacked_to_rounding");
    let lengths = [23, 5, 20, 41, 2, 7, 31];
    let texts: Vec<String> =
        lengths.iter().map(|&length| (0..length).map(|_| (b'a' + random.below(26) as u8) as char).collect()).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    assert_eq!(prepared(folder.path(), &texts).num_documents(), lengths.len());
    let (packed, alone) = (sequences(folder.path(), Packing::Documents), sequences(folder.path(), Packing::None));
    assert_eq!((packed.len(), alone.len()), (3, lengths.len()), "129 tokens fit three sequences of 48");
    for (family, real, tolerance) in [(Family::Llama, Real::F64, 1e-12), (Family::Qwen3, Real::F32, 2e-5)] {
        let model = ModelConfig { vocab_size: 128, ..model(family) };
        let device = cpu(real);
        let weights = random.bits();
        let run = |sequences: &[Sequence]| {
            let request = request(&model, setting(Keep::All), 48, sequences.len());
            let mut engine = engine(&device, &request, Some(0), Selection::All, weights);
            outcome(&mut engine, sequences)
        };
        let (packed, alone) = (run(&packed), run(&alone));
        assert!((packed.loss / alone.loss - 1.0).abs() < tolerance, "{family:?}: {} {}", packed.loss, alone.loss);
        let error = relative_error(&packed.grads, &alone.grads);
        assert!(error < tolerance, "{family:?}: relative error {error}");
    }
}
