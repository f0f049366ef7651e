//! Checkpoints that are not what was written, and disks that do not take what is to be written.

use super::common::*;
use oomb::state::{Error, check_room};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Cuts a file short, or flips one bit in its middle.
fn spoil(path: &Path, flip: bool) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    if flip {
        bytes[middle] ^= 4
    } else {
        bytes.truncate(middle)
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let place = workplace();
    let reference = place.whole("run", &[]);
    for (file, flip, problem) in [
        ("optimizer.safetensors", false, "it has 462640 bytes, wanted 925280"),
        ("model/model.safetensors", true, "its CRC is"),
        ("state.json", true, "its CRC is"),
        ("checksums.txt", false, "its last line is not the checksum of the others"),
    ] {
        place.rewind("run", 20);
        spoil(&place.run("run").join("checkpoints/step-20").join(file), flip);
        let said = place.resume("run", &[]);
        let start = format!("note: runs/run/checkpoints/step-20/{file} is damaged: {problem}");
        assert!(said.starts_with(&start) && said.contains("; it is not used\n"), "{said}");
        assert_eq!(place.result("run"), reference, "from the checkpoint before");
        assert!(place.run("run").join("checkpoints/damaged-step-20").join(file).exists(), "set aside, not thrown away");
    }
    place.rewind("run", 7);
    for step in [5, 7] {
        fs::remove_file(place.run("run").join(format!("checkpoints/step-{step}/state.json"))).unwrap();
    }
    let before = place.contents("run");
    let said = refused(&mut place.train("run", &[], &["--resume"]));
    insta::assert_snapshot!(said, @"
    error: no checkpoint in runs/run/checkpoints is intact:
      cannot read runs/run/checkpoints/step-7/state.json: No such file or directory (os error 2)
      cannot read runs/run/checkpoints/step-5/state.json: No such file or directory (os error 2)
    ");
    assert_eq!(place.contents("run"), before, "nothing is touched");
}

/// A file-size limit stands for a disk that is full: it stops root as well.
#[test]
fn a_full_disk_leaves_the_checkpoint_before() {
    let place = workplace();
    let reference = place.whole("run", &[]);
    place.rewind("run", 21);
    // In blocks of 1024 bytes: the weights (452 KiB) pass, the moments (904 KiB) do not.
    let limited = "trap '' XFSZ; ulimit -f 700; exec \"$0\" train --config run.toml --set run.out=runs/run --resume";
    let mut command = Command::new("bash");
    command.current_dir(place.path()).args(["-c", limited, env!("CARGO_BIN_EXE_oomb")]).stdout(Stdio::piped());
    let said = refused(&mut command);
    insta::assert_snapshot!(said, @"
    error: the checkpoint of step 25 could not be saved; the last is runs/run/checkpoints/step-21: go on from it with --resume
      because: cannot write runs/run/checkpoints/.step-25.partial/optimizer.safetensors: File too large (os error 27)
    ");
    let steps = place.checkpoints("run").steps().unwrap();
    assert_eq!(steps, [5, 7, 10, 14, 15, 20, 21]);
    assert!(steps.iter().all(|&step| place.checkpoints("run").open(step).is_ok()));
    let left = fs::read_dir(place.checkpoints("run").folder()).unwrap().count();
    assert_eq!(left, 7, "nothing half-written is left");
    place.resume("run", &[]);
    assert_eq!(place.result("run"), reference);
}

#[test]
fn what_does_not_fit_or_may_not_be_written_is_refused_before_any_work() {
    let place = workplace();
    let error = check_room(&place.path().join("a/b"), 1 << 62, "the checkpoints need", "take a larger disk").unwrap_err();
    assert!(matches!(error, Error::NoRoom { wanted: 0x4000_0000_0000_0000, .. }));
    assert!(error.to_string().contains(" free, but the checkpoints need 4194304.00 TiB: take a larger disk"), "{error}");
    check_room(place.path(), 1, "a byte needs", "").unwrap();

    // A file system that refuses root as well.
    let mut command = place.train("run", &["run.out=/proc/oomb/run"], &[]);
    let said = refused(&mut command);
    assert!(said.starts_with("error: cannot create /proc/"), "{said}");
    fs::write(place.path().join("file"), "").unwrap();
    let said = refused(&mut place.train("run", &["run.out=file/run"], &[]));
    assert!(said.contains("file"), "{said}");
}

/// Killed while the folder of the run was new: there is no checkpoint, or not even a configuration.
#[test]
fn a_run_without_a_checkpoint_begins_again() {
    let place = workplace();
    let reference = place.whole("reference", &[]);
    let said = place.resume("run", &[]);
    assert_eq!(said, "note: there is no run in runs/run yet\n");
    assert_eq!(place.result("run"), reference);
    fs::remove_dir_all(place.run("run").join("checkpoints")).unwrap();
    fs::remove_dir_all(place.run("run").join("model")).unwrap();
    fs::write(place.run("run").join("metrics.jsonl"), "{\"step\":1,\"lo").unwrap();
    let said = place.resume("run", &[]);
    assert_eq!(said, "note: the run in runs/run had no checkpoint yet\n");
    assert_eq!(place.result("run"), reference);
    assert_eq!(place.resume("run", &[]), "", "a finished run is done");
}
