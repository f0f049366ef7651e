//! The command as people run it: what it prints, what it refuses, what it leaves on disk.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use std::fs;
use std::path::Path;

/// Runs `oomb` in `folder`.
fn oomb(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("oomb").unwrap().current_dir(folder).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// What a failing command says.
fn refused(folder: &Path, args: &[&str]) -> String {
    let (code, stdout, stderr) = oomb(folder, args);
    assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
    stderr
}

#[test]
fn prepare_writes_once_and_overwrites_only_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    fs::write(dir.join("a.txt"), "one\ntwo\n").unwrap();
    fs::write(dir.join("b.txt"), "").unwrap();
    let args = ["prepare", "a.txt", "b.txt", "--out", "out", "--tokenizer", "bytes"];
    let (code, stdout, stderr) = oomb(dir, &args);
    assert_eq!(code, 0, "{stderr}");
    insta::assert_snapshot!(stdout, @"out: 8 tokens in 1 document of 2 files, vocabulary 256, 1 shard; left out: 1 with nothing to train, 0 malformed");
    insta::assert_snapshot!(stderr, @"left out: b.txt: empty");
    insta::assert_snapshot!(oomb(dir, &args).1, @"out: 8 tokens in 1 document of 2 files, vocabulary 256, 1 shard; left out: 1 with nothing to train, 0 malformed (made before from the same text)");
    fs::write(dir.join("a.txt"), "three\n").unwrap();
    insta::assert_snapshot!(refused(dir, &args), @"error: out was prepared from other text, in another way or with another tokenizer: name another folder, or give --overwrite; nothing was written");
    let (code, stdout, _) = oomb(dir, &[&args[..], &["--overwrite"]].concat());
    assert_eq!(
        (code, stdout.as_str()),
        (0, "out: 6 tokens in 1 document of 2 files, vocabulary 256, 1 shard; left out: 1 with nothing to train, 0 malformed\n")
    );
}

#[test]
fn prepare_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    fs::write(dir.join("latin1.txt"), b"caf\xe9\n").unwrap();
    insta::assert_snapshot!(refused(dir, &["prepare", "latin1.txt", "--out", "out", "--tokenizer", "bytes"]), @"error: latin1.txt is not UTF-8 text: byte 3 is 0xe9; convert it, or leave it out");
    insta::assert_snapshot!(refused(dir, &["prepare", "none.txt", "--out", "out", "--tokenizer", "bytes"]), @"error: cannot read none.txt: No such file or directory (os error 2)");
    insta::assert_snapshot!(refused(dir, &["prepare", "latin1.txt", "--out", "out", "--tokenizer", "byte"]), @r#"error: tokenizer byte: cannot read it: No such file or directory (os error 2); give "bytes", a tokenizer.json, or a folder that has one"#);
    assert!(!dir.join("out").exists());
    assert_eq!(oomb(dir, &["prepare", "latin1.txt"]).0, 2);
}
