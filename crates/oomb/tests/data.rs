//! From text to sequences: windows, order, prepared folders, and what is refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::{RowSettings, TokenizerSource};
use oomb::data::{
    Cursor, Dataset, Existing, Order, PrepareRequest, Prepared, Reading, Sequence, Share, Source, Tokenizer, Windows,
    open_source, prepare,
};
use oomb_device::ops::loss::IGNORE;
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Writes documents as files and returns their paths.
fn write_texts(folder: &Path, texts: &[&str]) -> Vec<PathBuf> {
    let write = |(index, text): (usize, &&str)| {
        let path = folder.join(format!("{index:03}.txt"));
        fs::write(&path, text).unwrap();
        path
    };
    texts.iter().enumerate().map(write).collect()
}

fn bytes() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Bytes).unwrap()
}

fn prepare_with(tokenizer: &Tokenizer, inputs: &[PathBuf], out: &Path, existing: Existing) -> oomb::data::Result<Prepared> {
    let reading = Reading::load(&RowSettings::default(), tokenizer)?;
    prepare(&PrepareRequest { inputs, out, tokenizer, reading: &reading, existing }, &mut |_| {})
}

fn prepare_bytes(inputs: &[PathBuf], out: &Path) -> oomb::data::Result<Prepared> {
    prepare_with(&bytes(), inputs, out, Existing::Keep)
}

/// A prepared folder of these texts.
fn prepared(texts: &[&str]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let inputs = write_texts(folder.path(), texts);
    let out = folder.path().join("out");
    prepare_bytes(&inputs, &out).unwrap();
    (folder, out)
}

/// An error with the temporary folder taken out of its message.
fn message<T>(result: oomb::data::Result<T>, folder: &Path) -> String {
    let error = result.err().expect("this should be refused");
    error.to_string().replace(&folder.display().to_string(), "DIR")
}

#[test]
fn a_sequence_packs_documents() {
    let sequence = Sequence::packed(vec![10, 11, 12, 20, 30, 31], &[0, 3, 4]);
    assert_eq!(sequence.labels, [11, 12, IGNORE, IGNORE, 31, IGNORE]);
    assert_eq!(sequence.positions, [0, 1, 2, 0, 0, 1]);
    assert_eq!(sequence.first, [0, 0, 0, 3, 4, 4]);
    assert_eq!(sequence.num_labels(), 3);
}

#[test]
fn windows_pack_and_keep_the_tail() {
    let (_folder, out) = prepared(&["abcde", "fg", "hij"]);
    let windows = Windows::new(Dataset::open(&out).unwrap(), 4).unwrap();
    let ids: Vec<String> =
        (0..windows.len()).map(|i| windows.get(i).unwrap().ids.iter().map(|&id| id as u8 as char).collect()).collect();
    assert_eq!(ids, ["abcd", "efgh", "ij"]);
    let second = windows.get(1).unwrap();
    assert_eq!(second.labels, [IGNORE, u32::from(b'g'), IGNORE, IGNORE]);
    assert_eq!(second.first, [0, 1, 1, 3]);
    assert_eq!(second.positions, [0, 0, 1, 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every pair of neighbours within a document is a label exactly once, unless a window ends between them.
    #[test]
    fn windows_cover_every_label_once(lengths in prop::collection::vec(1_usize..40, 1..8), sequence_tokens in 2_usize..50) {
        let texts: Vec<String> = lengths.iter().map(|&length| "x".repeat(length)).collect();
        let (_folder, out) = prepared(&texts.iter().map(String::as_str).collect::<Vec<_>>());
        let num_tokens: usize = lengths.iter().sum();
        let mut document_ends = vec![false; num_tokens];
        let mut end = 0;
        for length in &lengths {
            end += length;
            document_ends[end - 1] = true;
        }
        let windows = match Windows::new(Dataset::open(&out).unwrap(), sequence_tokens) {
            Ok(windows) => windows,
            Err(_) => {
                let longest = (0..num_tokens).step_by(sequence_tokens).any(|start| {
                    (start..(start + sequence_tokens).min(num_tokens) - 1).any(|t| !document_ends[t])
                });
                prop_assert!(sequence_tokens > num_tokens || !longest);
                return Ok(());
            }
        };
        let mut counted = vec![0; num_tokens];
        for index in 0..windows.len() {
            let (range, sequence) = (windows.pieces(index)[0].clone(), windows.get(index).unwrap());
            prop_assert!(sequence.ids.len() <= sequence_tokens && sequence.num_labels() > 0);
            for (t, &label) in sequence.labels.iter().enumerate() {
                let position = range.start as usize + t;
                prop_assert!(sequence.first[t] as usize <= t);
                prop_assert_eq!(sequence.positions[t] + sequence.first[t], t as u32);
                counted[position] += usize::from(label != IGNORE);
            }
        }
        for (position, &count) in counted.iter().enumerate() {
            let window_ends = (position + 1) % sequence_tokens == 0 || position + 1 == num_tokens;
            prop_assert_eq!(count, usize::from(!document_ends[position] && !window_ends), "token {}", position);
        }
    }

    #[test]
    fn an_epoch_visits_every_window_once_and_goes_on_from_a_cursor(num in 1_usize..60, seed: u64, skip in 0_usize..150) {
        let mut order = Order::new(&[Share { num_windows: num, weight: 1.0 }], seed, Cursor::default());
        let visited: Vec<usize> = (0..4 * num).map(|_| order.next_window().window).collect();
        for epoch in visited.chunks(num) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..num).collect::<Vec<_>>());
        }
        let skip = skip % (3 * num);
        let mut first = Order::new(&[Share { num_windows: num, weight: 1.0 }], seed, Cursor::default());
        for _ in 0..skip {
            first.next_window();
        }
        let mut resumed = Order::new(&[Share { num_windows: num, weight: 1.0 }], seed, first.cursor());
        let rest: Vec<usize> = (skip..4 * num).map(|_| resumed.next_window().window).collect();
        prop_assert_eq!(&rest[..], &visited[skip..]);
    }
}

#[test]
fn epochs_and_seeds_differ() {
    let shares = [Share { num_windows: 50, weight: 1.0 }];
    let mut order = Order::new(&shares, 0, Cursor::default());
    let visited: Vec<usize> = (0..100).map(|_| order.next_window().window).collect();
    assert_ne!(visited[..50], visited[50..]);
    assert_ne!(Order::new(&shares, 1, Cursor::default()).next_window().window, visited[0]);
}

/// A byte-level BPE of a few hundred merges, in the form that checkpoints ship. Its pre-tokeniser, GPT-2's, looks past
/// line breaks, which is what makes cutting text delicate.
fn bpe_file(folder: &Path, text: &str) -> PathBuf {
    use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainerBuilder::new().vocab_size(600).show_progress(false).initial_alphabet(alphabet).build();
    let mut trainer = tokenizers::models::TrainerWrapper::from(trainer);
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.train(&mut trainer, std::iter::once(text.to_owned())).unwrap();
    let path = folder.join("tokenizer.json");
    tokenizer.save(&path, false).unwrap();
    path
}

fn emma() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap()
}

#[test]
fn pieces_give_the_tokens_of_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = emma();
    assert!(text.len() > 3 * (256 << 10), "the text must be cut in several places");
    // Runs of line breaks, so that several become one token where nothing follows them.
    let file = bpe_file(folder.path(), &text[..100_000].replace('\n', "\n\n\n"));
    let tokenizer = Tokenizer::load(&TokenizerSource::Path(folder.path().to_path_buf())).unwrap();
    // Blank lines everywhere: most places between lines are not safe for this tokenizer.
    for (name, text) in [("emma", text.clone()), ("spaced", text.replace('\n', "\n\n")), ("one line", text.replace('\n', " "))] {
        let inputs = write_texts(folder.path(), &[&text]);
        let out = folder.path().join(name);
        let dataset = prepare_with(&tokenizer, &inputs, &out, Existing::Keep).unwrap().into_dataset();
        assert_eq!(dataset.tokens(0..dataset.num_tokens()).unwrap(), tokenizer.encode(&text).unwrap(), "{name}");
        assert_eq!(fs::read(dataset.tokenizer_file().unwrap()).unwrap(), fs::read(&file).unwrap());
    }
}

#[test]
fn not_utf8_names_file_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("latin1.txt");
    let mut content = "é".repeat(200_000).into_bytes();
    content.push(0xE9);
    content.extend(b" et la suite");
    fs::write(&path, &content).unwrap();
    let out = folder.path().join("out");
    insta::assert_snapshot!(message(prepare_bytes(std::slice::from_ref(&path), &out), folder.path()), @"DIR/latin1.txt is not UTF-8 text: byte 400000 is 0xe9; convert it, or leave it out");
    fs::write(&path, &content[..400_001]).unwrap();
    insta::assert_snapshot!(message(prepare_bytes(&[path], &out), folder.path()), @"DIR/latin1.txt is not UTF-8 text: byte 400000 is 0xe9; convert it, or leave it out");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn empty_and_missing_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let inputs = write_texts(folder.path(), &[""]);
    insta::assert_snapshot!(message(prepare_bytes(&inputs, &out), folder.path()), @"DIR/000.txt has no tokens: the text is empty");
    let missing = [folder.path().join("none.txt")];
    insta::assert_snapshot!(message(prepare_bytes(&missing, &out), folder.path()), @"cannot read DIR/none.txt: No such file or directory (os error 2)");
    fs::create_dir(folder.path().join("sub")).unwrap();
    insta::assert_snapshot!(message(prepare_bytes(&[folder.path().join("sub")], &out), folder.path()), @"DIR/sub has no tokens: neither a prepared folder, nor one of .txt, .jsonl or .parquet files");
    let inputs = write_texts(folder.path(), &["", "text"]);
    let Prepared::Written { left_out, .. } = prepare_bytes(&inputs, &out).unwrap() else { panic!("not written") };
    assert_eq!((left_out.len(), left_out[0].file.as_str(), left_out[0].row), (1, inputs[0].to_str().unwrap(), 0));
    assert!(matches!(prepare_bytes(&inputs, &out).unwrap(), Prepared::AlreadyThere(_)));
}

#[test]
fn nothing_is_overwritten() {
    let (folder, out) = prepared(&["some text"]);
    let before = fs::read(out.join("index.json")).unwrap();
    let inputs = [folder.path().join("000.txt")];
    assert!(matches!(prepare_bytes(&inputs, &out).unwrap(), Prepared::AlreadyThere(_)));
    fs::write(&inputs[0], "other text").unwrap();
    insta::assert_snapshot!(message(prepare_bytes(&inputs, &out), folder.path()), @"DIR/out was prepared from other text, in another way or with another tokenizer: name another folder, or give --overwrite; nothing was written");
    assert_eq!(fs::read(out.join("index.json")).unwrap(), before);

    let written = prepare_with(&bytes(), &inputs, &out, Existing::Overwrite).unwrap().into_dataset();
    assert_eq!(written.num_tokens(), 10);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary folder stays");

    let other = folder.path().join("precious");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("thesis.tex"), "years of work").unwrap();
    for existing in [Existing::Keep, Existing::Overwrite] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(message(prepare_with(&bytes(), &inputs, &other, existing), folder.path()), @"DIR/precious is not empty, and was not made by `oomb prepare`: name another folder; nothing was written");
        }
    }
    assert_eq!(fs::read_to_string(other.join("thesis.tex")).unwrap(), "years of work");
    insta::assert_snapshot!(message(prepare_bytes(&inputs, &inputs[0]), folder.path()), @"DIR/000.txt is a file: name a folder; nothing was written");
}

/// Opens `out` after `damage` and returns the message.
fn damaged(damage: impl FnOnce(&Path)) -> String {
    let (folder, out) = prepared(&["abcdefgh", "ijkl"]);
    damage(&out);
    message(Dataset::open(&out), folder.path())
}

fn edit_index(out: &Path, from: &str, to: &str) {
    let path = out.join("index.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn damaged_folders_are_refused() {
    insta::assert_snapshot!(damaged(|out| fs::write(out.join("tokens-00000.bin"), [0; 40]).unwrap()), @"DIR/out/tokens-00000.bin is damaged: wanted 48 bytes, got 40; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| {
        let mut content = fs::read(out.join("tokens-00000.bin")).unwrap();
        content[20] ^= 1;
        fs::write(out.join("tokens-00000.bin"), content).unwrap();
    }), @"DIR/out/tokens-00000.bin is damaged: wanted CRC 9cc35633, got 9d76ab2e; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| fs::remove_file(out.join("tokens-00000.bin")).unwrap()), @"cannot read DIR/out/tokens-00000.bin: No such file or directory (os error 2)");
    insta::assert_snapshot!(damaged(|out| fs::remove_file(out.join("index.json")).unwrap()), @"cannot read DIR/out/index.json: No such file or directory (os error 2)");
    insta::assert_snapshot!(damaged(|out| fs::write(out.join("index.json"), "{").unwrap()), @"DIR/out/index.json is damaged: not JSON: EOF while parsing an object at line 1 column 1; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| edit_index(out, "oomb-tokens", "bees")), @r#"DIR/out/index.json is damaged: its "format" is not "oomb-tokens"; make it again with `oomb prepare … --overwrite`"#);
    insta::assert_snapshot!(damaged(|out| edit_index(out, "\"version\": 2", "\"version\": 9")), @"DIR/out/index.json has format version 9, this program reads 1 to 2: make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| fs::write(out.join("documents.bin"), [0; 24]).unwrap()), @"DIR/out/documents.bin is damaged: wanted 32 bytes, got 24; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| {
        let mut content = fs::read(out.join("documents.bin")).unwrap();
        content[0] ^= 1;
        fs::write(out.join("documents.bin"), content).unwrap();
    }), @"DIR/out/documents.bin is damaged: wanted CRC e2852de0, got 135f284a; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| edit_index(out, "\"num_tokens\": 12", "\"num_tokens\": 13")), @"DIR/out/index.json is damaged: 13 tokens in all, but shards have 12 and documents 12; make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| edit_index(out, "\"largest_id\": 108", "\"largest_id\": 107")), @"DIR/out/index.json is damaged: largest_id = 107, but the largest in the shards is Some(108); make it again with `oomb prepare … --overwrite`");
    insta::assert_snapshot!(damaged(|out| edit_index(out, "\"vocab_size\": 256", "\"vocab_size\": 100")), @"DIR/out holds token id 108, outside the vocabulary of 100 of the model; prepare the data with the model's own tokenizer");
}

#[test]
fn sequences_longer_than_the_data_and_ids_beyond_the_model() {
    let (folder, out) = prepared(&["abcdefgh", "ijkl"]);
    let dataset = Dataset::open(&out).unwrap();
    dataset.check_vocabulary(109).unwrap();
    insta::assert_snapshot!(message(dataset.check_vocabulary(108), folder.path()), @"DIR/out holds token id 108, outside the vocabulary of 108 of the model; prepare the data with the model's own tokenizer");
    insta::assert_snapshot!(message(Windows::new(dataset, 13), folder.path()), @"data.sequence_tokens = 13 is longer than the data: DIR/out has 12 tokens; shorten the sequence, or add text");
    let (folder, out) = prepared(&["a", "b"]);
    insta::assert_snapshot!(message(Windows::new(Dataset::open(&out).unwrap(), 2), folder.path()), @"every document of DIR/out has no tokens to predict: each is a single token");
}

#[test]
fn sources_are_prepared_once() {
    let folder = tempfile::tempdir().unwrap();
    let inputs = write_texts(folder.path(), &["abcdefgh", "ijkl"]);
    let cache = folder.path().join("prepared");
    let open = |paths: &[PathBuf], tokenizer: Option<TokenizerSource>| {
        let mut reports = 0;
        let source = Source { paths, tokenizer: tokenizer.as_ref(), rows: &RowSettings::default(), prepared_in: &cache };
        open_source(&source, &mut |_| reports += 1).map(|dataset| (dataset, reports))
    };
    let (dataset, reports) = open(&inputs, Some(TokenizerSource::Bytes)).unwrap();
    assert_eq!((dataset.num_tokens(), reports), (12, 2));
    let (again, reports) = open(&inputs, Some(TokenizerSource::Bytes)).unwrap();
    assert_eq!((again.folder(), reports), (dataset.folder(), 0));
    let made = vec![dataset.folder().to_path_buf()];
    open(&made, None).unwrap();
    open(&made, Some(TokenizerSource::Bytes)).unwrap();

    insta::assert_snapshot!(message(open(&inputs, None), folder.path()), @r#"DIR/000.txt is text, which needs a tokenizer: set data.tokenizer to "bytes", a tokenizer.json, or the folder of the checkpoint"#);
    let both = [made.clone(), inputs.clone()].concat();
    let text = message(open(&both, Some(TokenizerSource::Bytes)), folder.path());
    assert!(text.ends_with("is a prepared folder: it must be the only path, got 3 paths"), "{text}");
    let other = bpe_file(folder.path(), "some words to learn from");
    let text = message(open(&made, Some(TokenizerSource::Path(other))), folder.path());
    assert!(text.contains("was prepared with the byte tokenizer, but data.tokenizer is a tokenizer.json of "), "{text}");
    fs::write(&inputs[0], "changed").unwrap();
    let (changed, _) = open(&inputs, Some(TokenizerSource::Bytes)).unwrap();
    assert_ne!(changed.folder(), dataset.folder());
}

#[test]
fn tokenizers_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let load = |path: PathBuf| message(Tokenizer::load(&TokenizerSource::Path(path)), folder.path());
    insta::assert_snapshot!(load(folder.path().to_path_buf()), @r#"tokenizer DIR/tokenizer.json: cannot read it: No such file or directory (os error 2); give "bytes", a tokenizer.json, or a folder that has one"#);
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let text = load(folder.path().join("tokenizer.json"));
    assert!(text.starts_with("tokenizer DIR/tokenizer.json: not a tokenizer.json: "), "{text}");
}
