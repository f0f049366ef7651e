//! Documents into sequences, kept whole or cut, and several sources in one order.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::{DataFormat, LongDocuments, Packing, RowSettings, TokenizerSource};
use oomb::data::{
    Cursor, Cutting, Dataset, Existing, Order, PrepareRequest, Reading, Share, Sources, Tokenizer, Windows, prepare,
};
use oomb_device::ops::loss::IGNORE;
use proptest::prelude::*;
use serde_json::json;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Prepares rows; byte tokens.
fn prepared(rows: &[serde_json::Value], settings: &RowSettings) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> = rows.iter().map(ToString::to_string).collect();
    let file = folder.path().join("rows.jsonl");
    fs::write(&file, lines.join("\n")).unwrap();
    let tokenizer = Tokenizer::load(&TokenizerSource::Bytes).unwrap();
    let reading = Reading::load(settings, &tokenizer).unwrap();
    let (inputs, out) = ([file], folder.path().join("out"));
    let request =
        PrepareRequest { inputs: &inputs, out: &out, tokenizer: &tokenizer, reading: &reading, existing: Existing::Keep };
    prepare(&request, &mut |_| {}).unwrap();
    folder
}

/// Texts of these lengths, each of a letter of its own.
fn texts(lengths: &[usize]) -> TempDir {
    let text = |(index, &length): (usize, &usize)| json!({ "text": char::from(b'a' + index as u8).to_string().repeat(length) });
    prepared(&lengths.iter().enumerate().map(text).collect::<Vec<_>>(), &RowSettings::default())
}

fn cut(folder: &TempDir, sequence_tokens: usize, packing: Packing, long_documents: LongDocuments) -> oomb::data::Result<Windows> {
    let dataset = Dataset::open(&folder.path().join("out")).unwrap();
    Windows::cut(dataset, Cutting { sequence_tokens, packing, long_documents })
}

fn shown(windows: &Windows) -> Vec<String> {
    let text = |index| windows.get(index).unwrap().ids.iter().map(|&id| id as u8 as char).collect();
    (0..windows.len()).map(text).collect()
}

#[test]
fn documents_are_packed_whole() {
    let folder = texts(&[6, 3, 12, 2, 7, 1, 4]);
    let cut = |packing, long| cut(&folder, 10, packing, long).unwrap();
    let windows = cut(Packing::Documents, LongDocuments::Cut);
    assert_eq!(shown(&windows), ["aaaaaagggg", "bbbeeeeeee", "cccccccccc", "ccdd"]);
    assert_eq!(windows.fates().without_labels, [5], "one letter predicts nothing");
    let packed = windows.get(0).unwrap();
    assert_eq!(packed.first, [0, 0, 0, 0, 0, 0, 6, 6, 6, 6]);
    assert_eq!(packed.positions, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]);
    assert_eq!(packed.labels.iter().filter(|&&label| label == IGNORE).count(), 2);
    let windows = cut(Packing::Documents, LongDocuments::Truncate);
    assert_eq!(shown(&windows), ["aaaaaagggg", "bbbeeeeeee", "cccccccccc", "dd"]);
    assert_eq!((windows.fates().truncated.as_slice(), windows.fates().num_used), (&[2][..], 6));
    assert_eq!(windows.dataset().document_name(2), format!("{}/rows.jsonl row 3", folder.path().display()));
    let windows = cut(Packing::None, LongDocuments::Skip);
    assert_eq!(shown(&windows), ["aaaaaa", "bbb", "dd", "eeeeeee", "gggg"]);
    assert_eq!(windows.fates().too_long, [2]);
    assert_eq!(shown(&cut(Packing::Auto, LongDocuments::Auto))[0], "aaaaaabbbc", "text is cut where a sequence ends");
    assert_eq!(shown(&cut(Packing::Auto, LongDocuments::Skip))[0], "aaaaaagggg", "keeping documents whole was asked for");
}

#[test]
fn nothing_left_says_what_to_change() {
    let folder = texts(&[12, 15]);
    let refuse = |packing, long| {
        let error = cut(&folder, 10, packing, long).unwrap_err().to_string();
        error.replace(&folder.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!(refuse(Packing::Documents, LongDocuments::Skip), @r#"no document of DIR/out fits data.sequence_tokens = 10: lengthen the sequence, or set data.long_documents = "truncate""#);
    let folder = texts(&[1, 1]);
    let error = cut(&folder, 10, Packing::Documents, LongDocuments::Cut).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&folder.path().display().to_string(), "DIR"), @"every document of DIR/out has no tokens to predict: each is a single token");
}

#[test]
fn conversations_are_kept_from_their_beginning() {
    let talk = |question: &str, answer: &str| json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]});
    let template = tempfile::tempdir().unwrap();
    let file = template.path().join("chat.jinja");
    fs::write(&file, "{% for m in messages %}{{ m.role[0] }}{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}{{ m.content if m.role == 'user' }}{% endfor %}").unwrap();
    let settings = RowSettings { format: Some(DataFormat::Chat), chat_template: Some(file), ..RowSettings::default() };
    let folder = prepared(&[talk("??", "yes"), talk("?????????", "no"), talk("?", "perhaps, perhaps")], &settings);
    let windows = cut(&folder, 10, Packing::Auto, LongDocuments::Auto).unwrap();
    assert_eq!(shown(&windows), ["u??ayes", "u?aperhaps"]);
    assert_eq!((windows.fates().truncated.as_slice(), windows.fates().without_labels.as_slice()), (&[2][..], &[1][..]));
    let labels: String =
        windows.get(0).unwrap().labels.iter().map(|&label| if label == IGNORE { '.' } else { label as u8 as char }).collect();
    assert_eq!(labels, "...yes.");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_document_is_used_once(lengths in prop::collection::vec(1_usize..40, 1..20), sequence_tokens in 2_usize..50) {
        let folder = texts(&lengths);
        for (packing, long) in [
            (Packing::Documents, LongDocuments::Cut),
            (Packing::Documents, LongDocuments::Truncate),
            (Packing::None, LongDocuments::Skip),
        ] {
            let Ok(windows) = cut(&folder, sequence_tokens, packing, long) else {
                prop_assert!(lengths.iter().all(|&length| length < 2 || length > sequence_tokens && long == LongDocuments::Skip));
                continue;
            };
            let mut labels = vec![0; lengths.len()];
            for index in 0..windows.len() {
                let sequence = windows.get(index).unwrap();
                prop_assert!(sequence.ids.len() <= sequence_tokens && sequence.ids.len() as u64 == windows.num_tokens(index));
                for (t, &label) in sequence.labels.iter().enumerate().filter(|(_, label)| **label != IGNORE) {
                    prop_assert_eq!(label, sequence.ids[t], "each document is of one letter");
                    labels[label as usize - usize::from(b'a')] += 1;
                }
            }
            for (&length, &labels) in lengths.iter().zip(&labels) {
                let wanted = match long {
                    _ if length <= sequence_tokens => length - 1,
                    LongDocuments::Skip => 0,
                    LongDocuments::Truncate => sequence_tokens - 1,
                    _ => length - length.div_ceil(sequence_tokens),
                };
                prop_assert_eq!(labels, wanted, "a document of {} tokens, {:?}", length, long);
            }
            if packing == Packing::Documents {
                let used: u64 = (0..windows.len()).map(|index| windows.num_tokens(index)).sum();
                prop_assert!((windows.len() as u64 - 1) * sequence_tokens as u64 <= 2 * used, "windows are at least half full");
            }
        }
    }

    #[test]
    fn sources_have_their_share_and_go_on_from_a_cursor(
        sources in prop::collection::vec((1_usize..30, 1_u32..20), 1..5), seed: u64, stop in 0_usize..200,
    ) {
        let shares: Vec<Share> =
            sources.iter().map(|&(num_windows, weight)| Share { num_windows, weight: f64::from(weight) / 4.0 }).collect();
        let weights: f64 = shares.iter().map(|share| share.weight).sum();
        let mut order = Order::new(&shares, seed, Cursor::default());
        let (mut visited, mut places) = (vec![0.0; shares.len()], Vec::new());
        let mut halfway = None;
        for count in 1..=400 {
            let place = order.next_window();
            prop_assert!(place.window < shares[place.source].num_windows);
            visited[place.source] += 1.0;
            places.push(place);
            for (share, visited) in shares.iter().zip(&visited) {
                let wanted = f64::from(count) * share.weight / weights;
                prop_assert!((visited - wanted).abs() < shares.len() as f64, "{:?} after {}", visited, count);
            }
            if count as usize == stop {
                halfway = Some(order.cursor());
            }
        }
        for (source, share) in shares.iter().enumerate() {
            let of_source: Vec<usize> = places.iter().filter(|place| place.source == source).map(|place| place.window).collect();
            for epoch in of_source.chunks_exact(share.num_windows) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..share.num_windows).collect::<Vec<_>>());
            }
        }
        let saved = serde_json::to_string(&halfway.unwrap_or_default()).unwrap();
        let mut resumed = Order::new(&shares, seed, serde_json::from_str(&saved).unwrap());
        let rest: Vec<_> = (stop..400).map(|_| resumed.next_window()).collect();
        prop_assert_eq!(&rest[..], &places[stop..]);
        prop_assert!((resumed.epochs() - order.epochs()).abs() < 1e-12);
    }
}

#[test]
fn sources_of_two_tokenizers_are_not_mixed() {
    let (one, other) = (texts(&[5]), texts(&[6]));
    let index = other.path().join("out/index.json");
    let text = fs::read_to_string(&index).unwrap();
    let made = "\"kind\": \"hugging_face\", \"crc32\": 7, \"file_bytes\": 9";
    fs::write(&index, text.replace("\"kind\": \"bytes\"", made)).unwrap();
    let windows = |folder| cut(folder, 4, Packing::Concat, LongDocuments::Auto).unwrap();
    let error = Sources::new(vec![(windows(&one), 1.0), (windows(&other), 2.0)]).unwrap_err().to_string();
    let name = |path: &Path| path.display().to_string();
    insta::assert_snapshot!(error.replace(&name(other.path()), "DIR"), @"DIR/out was prepared with a tokenizer.json of 9 bytes (CRC 00000007), but the first of the sources with the byte tokenizer: prepare all with one tokenizer");
    assert!(!Cursor::default().sources.iter().any(|_| true) && Cursor::default().fits(&[]));
}
