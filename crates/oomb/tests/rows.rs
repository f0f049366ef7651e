//! Files of rows: every format and packing, what is left out and how it is named, and folders of the first version.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use oomb::config::{DataFormat, LossOn, Malformed, RowSettings, TokenizerSource};
use oomb::data::{Advance, Dataset, Existing, LeftOut, PrepareRequest, Prepared, Reading, Tokenizer, prepare, preview};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const LINES: &str = "{\"text\": \"one\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"three\\n\"}\n";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn write(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

fn bytes() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Bytes).unwrap()
}

fn prepare_as(rows: &RowSettings, inputs: &[PathBuf], out: &Path) -> oomb::data::Result<Prepared> {
    let tokenizer = bytes();
    let reading = Reading::load(rows, &tokenizer)?;
    let request = PrepareRequest { inputs, out, tokenizer: &tokenizer, reading: &reading, existing: Existing::Keep };
    prepare(&request, &mut |_: Advance| {})
}

fn chat() -> RowSettings {
    let chat_template = Some(golden("golden_chat/qwen2.5.jinja"));
    RowSettings { format: Some(DataFormat::Chat), chat_template, ..RowSettings::default() }
}

fn skip(rows: RowSettings) -> RowSettings {
    RowSettings { malformed: Some(Malformed::Skip), ..rows }
}

/// Text and name of each document, of byte tokens.
fn documents(dataset: &Dataset, folder: &Path) -> Vec<(String, String)> {
    let text = |index: usize| {
        let ids = dataset.tokens(dataset.document(index)).unwrap();
        String::from_utf8(ids.iter().map(|&id| id as u8).collect()).unwrap()
    };
    let name = |index: usize| dataset.document_name(index).replace(&folder.display().to_string(), "DIR");
    (0..dataset.num_documents()).map(|index| (text(index), name(index))).collect()
}

fn message<T>(result: oomb::data::Result<T>, folder: &Path) -> String {
    let text = result.err().expect("this should be refused").to_string();
    text.replace(&folder.display().to_string(), "DIR").replace(&golden("").display().to_string(), "TESTS/")
}

fn gzip(content: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn every_row_is_a_document_whatever_the_packing() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let files = [
        write(dir, "a.jsonl", LINES),
        write(dir, "b.jsonl.gz", [gzip(&LINES[..24]), gzip(&LINES[24..])].concat()),
        write(dir, "c.txt.gz", gzip("a whole file\n")),
        write(dir, "d.ndjson", format!("\u{feff}{}", LINES.trim_end())),
    ];
    let Prepared::Written { dataset, left_out } = prepare_as(&RowSettings::default(), &files, &dir.join("out")).unwrap() else {
        panic!("nothing was written")
    };
    let rows =
        |file: &str| [("one".to_owned(), format!("DIR/{file} row 1")), ("three\n".to_owned(), format!("DIR/{file} row 4"))];
    let whole = [("a whole file\n".to_owned(), "DIR/c.txt.gz".to_owned())];
    let wanted = [&rows("a.jsonl")[..], &rows("b.jsonl.gz"), &whole, &rows("d.ndjson")].concat();
    assert_eq!(documents(&dataset, dir), wanted);
    assert_eq!(left_out.iter().map(|row| row.row).collect::<Vec<_>>(), [3, 3, 3]);
    let counts: Vec<_> =
        dataset.index().files.iter().map(|file| (file.num_documents, file.num_empty, file.num_malformed)).collect();
    assert_eq!(counts, [(2, 1, 0), (2, 1, 0), (1, 0, 0), (2, 1, 0)]);
    let listed = fs::read_to_string(dir.join("out/left_out.jsonl")).unwrap();
    assert_eq!(listed.lines().count(), 3);
    assert!(matches!(prepare_as(&RowSettings::default(), &files, &dir.join("out")).unwrap(), Prepared::AlreadyThere(_)));
}

#[test]
fn tables_and_frames_of_other_writers_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let wanted = ["The first text.", "Größe: 5 km², 中文 🦀", "The last."];
    for name in ["texts.parquet", "texts.jsonl.zst"] {
        let prepared = prepare_as(&skip(RowSettings::default()), &[golden("golden_rows").join(name)], &dir.join(name)).unwrap();
        let Prepared::Written { dataset, left_out } = prepared else { panic!("nothing was written") };
        let (texts, names): (Vec<_>, Vec<_>) = documents(&dataset, &golden("golden_rows")).into_iter().unzip();
        assert_eq!(texts, wanted, "{name}");
        assert_eq!(names, [1, 3, 5].map(|row| format!("DIR/{name} row {row}")));
        let out: Vec<(u64, &str)> = left_out.iter().map(|row| (row.row, row.why.as_str())).collect();
        assert_eq!(out[0], (2, "nothing in it is trained"), "{name}");
        assert!(out[1].0 == 4 && out[1].1.contains("null"), "{name}: {out:?}");
    }
    let text = message(prepare_as(&RowSettings::default(), &[golden("golden_rows/texts.parquet")], &dir.join("out")), dir);
    insta::assert_snapshot!(text, @r#"TESTS/golden_rows/texts.parquet row 4: field `text` is null; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    let talks = prepare_as(&chat(), &[golden("golden_rows/talks.parquet")], &dir.join("talks")).unwrap().into_dataset();
    let texts: Vec<String> = documents(&talks, dir).into_iter().map(|(text, _)| text).collect();
    assert_eq!(texts.len(), 2, "nobody answers in the third");
    assert!(texts[0].ends_with("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"), "{}", texts[0]);
    let call = "\n<tool_call>\n{\"name\": \"sky\", \"arguments\": {\"place\": \"Köln\"}}\n</tool_call><|im_end|>\n";
    assert!(texts[1].ends_with(&format!("<|im_start|>assistant{call}")), "{}", texts[1]);
}

#[test]
fn folders_and_patterns_stand_for_files() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    for name in ["in/b.jsonl", "in/a.txt", "in/notes.pdf", "in/deep/c.jsonl", "in/deep/er/d.jsonl"] {
        write(dir, name, format!("{{\"text\": \"{name}\"}}"));
    }
    let names = |input: &str, out: &str| -> Vec<String> {
        let dataset = prepare_as(&RowSettings::default(), &[dir.join(input)], &dir.join(out)).unwrap().into_dataset();
        dataset.index().files.iter().map(|file| file.name.replace(&format!("{}/in/", dir.display()), "")).collect()
    };
    assert_eq!(names("in", "1"), ["a.txt", "b.jsonl"]);
    assert_eq!(names("in/*.jsonl", "2"), ["b.jsonl"]);
    assert_eq!(names("in/**/*.jsonl", "3"), ["b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]);
    write(dir, "[odd].txt", "a name that looks like a pattern");
    let odd = prepare_as(&RowSettings::default(), &[dir.join("[odd].txt")], &dir.join("4")).unwrap().into_dataset();
    assert_eq!(odd.num_documents(), 1);
    let refuse = |input: &str| message(prepare_as(&RowSettings::default(), &[dir.join(input)], &dir.join("out")), dir);
    insta::assert_snapshot!(refuse("in/*.md"), @"DIR/in/*.md has no tokens: no file fits the pattern");
    insta::assert_snapshot!(refuse("in/***"), @"DIR/in/*** is not a pattern of files: Pattern syntax error near position 21: wildcards are either regular `*` or recursive `**`");
}

#[test]
fn a_row_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let refuse = |rows: &RowSettings, content: &[u8]| {
        let file = write(dir, "x.jsonl", content);
        let text = message(prepare_as(rows, &[file], &dir.join("out")), dir);
        assert!(!dir.join("out").exists() && fs::read_dir(dir).unwrap().count() == 1, "nothing is left behind");
        text
    };
    let text = RowSettings::default();
    insta::assert_snapshot!(refuse(&text, b"{\"text\": \"a\"}\n{\"text\": \"b\", }\n"), @r#"DIR/x.jsonl row 2: not JSON: trailing comma at column 15; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&text, b"{\"content\": \"a\", \"id\": 3}\n"), @r#"DIR/x.jsonl row 1: there is no field `text`: it has content, id; name one with data.field (--field); mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&text, b"{\"text\": [\"a\"]}\n"), @r#"DIR/x.jsonl row 1: field `text` must be a string, got a list; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&text, b"[1, 2]\n"), @r#"DIR/x.jsonl row 1: not a JSON object; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&text, b"{\"text\": \"caf\xe9\"}\n"), @r#"DIR/x.jsonl row 1: not JSON: invalid unicode code point at column 14; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&chat(), b"{\"text\": \"a\"}\n"), @r#"DIR/x.jsonl row 1: there is no field `messages`: it has text; name one with data.field (--field); mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&chat(), b"{\"messages\": \"Hello\"}\n"), @r#"DIR/x.jsonl row 1: field `messages` must be a list of messages, got a string; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&chat(), b"{\"messages\": [{\"from\": \"user\", \"value\": \"Hello\"}]}\n"), @r#"DIR/x.jsonl row 1: message 1 has no `role`; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    insta::assert_snapshot!(refuse(&skip(text.clone()), b"[1, 2]\n{\"text\": 3}\n"), @r#"DIR/x.jsonl row 1: not a JSON object; mend the row, or leave such rows out with data.malformed = "skip" (--skip-malformed)"#);
    let bad = write(dir, "x.jsonl", b"[1]\n{\"text\": \"good\"}\n[2]\n");
    let Prepared::Written { dataset, left_out } = prepare_as(&skip(text), &[bad], &dir.join("out")).unwrap() else {
        panic!("nothing was written")
    };
    assert_eq!(documents(&dataset, dir), [("good".to_owned(), "DIR/x.jsonl row 2".to_owned())]);
    let file = dir.join("x.jsonl").display().to_string();
    let wrong = |row| LeftOut { file: file.clone(), row, why: "not a JSON object".to_owned() };
    assert_eq!(left_out, [wrong(1), wrong(3)]);
}

#[test]
fn files_that_are_not_what_they_are_called() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let refuse = |rows: &RowSettings, name: &str, content: &[u8]| {
        message(prepare_as(rows, &[write(dir, name, content)], &dir.join("out")), dir)
    };
    let text = RowSettings::default();
    let column = RowSettings { field: Some("content".to_owned()), ..text.clone() };
    insta::assert_snapshot!(refuse(&column, "a.parquet", &fs::read(golden("golden_rows/texts.parquet")).unwrap()), @"DIR/a.parquet as Parquet: there is no column `content`: it has id, text; name one with data.field (--field)");
    insta::assert_snapshot!(refuse(&text, "b.parquet", b"not a table"), @"DIR/b.parquet as Parquet: Parquet error: Invalid Parquet file. Corrupt footer");
    insta::assert_snapshot!(refuse(&text, "c.parquet.gz", b""), @"DIR/c.parquet.gz is a packed Parquet file: unpack it, Parquet is read at random and packs its columns itself");
    insta::assert_snapshot!(refuse(&text, "d.jsonl.gz", b"{\"text\": \"not packed\"}"), @"cannot read DIR/d.jsonl.gz: invalid gzip header");
    insta::assert_snapshot!(refuse(&text, "e.txt.zst", b"not packed"), @"cannot read DIR/e.txt.zst: not Zstandard: BadMagicNumber(544501614)");
    insta::assert_snapshot!(refuse(&chat(), "f.txt", b"Hello"), @r#"DIR/f.txt is plain text, which has no conversations: give .jsonl or .parquet files, or set data.format = "text""#);
    // Each truncation is an error, none a panic.
    for (name, file) in [("t.parquet", "golden_rows/texts.parquet"), ("t.jsonl.zst", "golden_rows/texts.jsonl.zst")] {
        let whole = fs::read(golden(file)).unwrap();
        for length in (0..whole.len()).step_by(7) {
            let input = [write(dir, name, &whole[..length])];
            let out = dir.join("truncated");
            if let Ok(Prepared::Written { dataset, .. }) = prepare_as(&skip(RowSettings::default()), &input, &out) {
                assert!(dataset.num_documents() < 3, "{length} of {} bytes of {name}", whole.len());
                fs::remove_dir_all(&out).unwrap();
            }
        }
    }
}

#[test]
fn only_what_the_assistant_says_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let talks = write(
        dir,
        "talks.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}, {\"role\": \"assistant\", \"content\": \"Hi\"}]}\n",
    );
    let dataset = prepare_as(&chat(), std::slice::from_ref(&talks), &dir.join("out")).unwrap().into_dataset();
    let (ids, trained) = (dataset.tokens(dataset.document(0)).unwrap(), dataset.trained(dataset.document(0)).unwrap());
    let said: String = ids.iter().zip(&trained).filter(|(_, trained)| **trained).map(|(&id, _)| id as u8 as char).collect();
    // The byte tokenizer knows no special tokens, so the line break behind the turn counts as part of it.
    assert_eq!(said, "Hi<|im_end|>\n");
    assert_eq!(dataset.index().num_trained, said.len() as u64);
    let all = RowSettings { loss_on: Some(LossOn::All), ..chat() };
    let refused = prepare_as(&all, std::slice::from_ref(&talks), &dir.join("out"));
    assert!(message(refused, dir).contains("in another way"), "the folder was made with another mask");
    let all = prepare_as(&all, std::slice::from_ref(&talks), &dir.join("all")).unwrap().into_dataset();
    assert_eq!(all.index().num_trained, all.num_tokens());
    let tokenizer = bytes();
    let shown = preview(&[talks], &tokenizer, &Reading::load(&chat(), &tokenizer).unwrap()).unwrap();
    assert_eq!((shown.num_tokens, shown.num_trained), (ids.len(), said.len()));
    assert_eq!(shown.trained.iter().map(|run| &shown.text[run.clone()]).collect::<Vec<_>>(), [&said]);
}

#[test]
fn folders_of_the_first_version_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u8> = b"abcdefgh".iter().flat_map(|&byte| u32::from(byte).to_le_bytes()).collect();
    write(folder.path(), "tokens-00000.bin", &ids);
    let document = |name: &str, first: u64, tokens: u64| serde_json::json!({"name": name, "first_token": first, "num_tokens": tokens, "source_bytes": tokens, "source_crc32": 7});
    let index = |second: u64| {
        serde_json::json!({
            "format": "oomb-tokens", "version": 1, "tokenizer": {"kind": "bytes"}, "vocab_size": 256, "num_tokens": 8,
            "largest_id": 104, "shards": [{"file": "tokens-00000.bin", "num_tokens": 8, "crc32": crc32fast::hash(&ids)}],
            "documents": [document("a.txt", 0, 3), document("b.txt", second, 5)],
        })
    };
    write(folder.path(), "index.json", index(3).to_string());
    let dataset = Dataset::open(folder.path()).unwrap();
    let wanted = [("abc".to_owned(), "a.txt".to_owned()), ("defgh".to_owned(), "b.txt".to_owned())];
    assert_eq!((documents(&dataset, folder.path()), dataset.is_masked()), (wanted.to_vec(), false));
    write(folder.path(), "index.json", index(4).to_string());
    insta::assert_snapshot!(message(Dataset::open(folder.path()), folder.path()), @"DIR/index.json is damaged: document b.txt should start at token 3 and have tokens, it starts at 4; make it again with `oomb prepare … --overwrite`");
}

/// Damage of a byte is an error or another text, never a panic or an endless loop.
#[test]
fn damaged_files_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut state = 1_u64;
    for name in ["texts.parquet", "talks.parquet", "texts.jsonl.zst"] {
        let whole = fs::read(golden("golden_rows").join(name)).unwrap();
        for _ in 0..25 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (at, bit) = ((state >> 33) as usize % whole.len(), (state >> 29) & 7);
            let mut content = whole.clone();
            content[at] ^= 1 << bit;
            let input = [write(dir, name, &content)];
            let settings = if name == "talks.parquet" { skip(chat()) } else { skip(RowSettings::default()) };
            let out = dir.join("out");
            if prepare_as(&settings, &input, &out).is_ok() {
                fs::remove_dir_all(&out).unwrap();
            }
        }
    }
}
