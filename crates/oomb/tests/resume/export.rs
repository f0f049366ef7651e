//! Models of runs that are not finished, and which checkpoints stay.

use super::common::*;
use std::process::Command;

fn export(place: &Workplace, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomb"));
    command.current_dir(place.path()).args(["export", "--run", "runs/run"]).args(args);
    command
}

#[test]
fn newest_best_or_named() {
    let place = workplace();
    let set = ["run.keep_checkpoints=1", "run.steps=12", "run.validate_every=4", "run.compute_dtype=bf16"];
    // Learns, then is spoilt by a rate that rises for long.
    let set = [&set[..], &["optimizer.lr=3", "optimizer.warmup_steps=12", "run.checkpoint_every=6"]].concat();
    let finished = place.whole("run", &set);
    let validated: Vec<(usize, f64)> =
        place.metrics("run").iter().filter_map(|record| Some((record.step, record.validation_loss?))).collect();
    let best = validated.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    assert_ne!(best, 12, "the last is not the best, or this test shows nothing: {validated:?}");
    assert_eq!(place.checkpoints("run").steps().unwrap(), [best, 12], "the newest and the best");

    let weights = |folder: &str| std::fs::read(place.path().join(folder).join("model.safetensors")).unwrap();
    let (_, said) = succeed(&mut export(&place, &["--out", "last", "--checkpoint", "step-12"]));
    assert_eq!(said, "note: exporting checkpoint step-12\n");
    succeed(&mut export(&place, &["--out", "finished"]));
    assert_eq!(weights("last"), weights("finished"), "masters in f32, rounded to the type in which the run computes");
    let (_, said) = succeed(&mut export(&place, &["--out", "best", "--checkpoint", "best"]));
    assert_eq!(said, format!("note: exporting checkpoint step-{best}\n"));
    assert_ne!(weights("best"), weights("finished"));

    place.rewind("run", 12);
    let (_, said) = succeed(&mut export(&place, &["--out", "unfinished", "--dtype", "f32"]));
    assert_eq!(said, "note: exporting checkpoint step-12\n");
    assert!(weights("unfinished").len() > weights("finished").len() + 115_000 * 2, "f32 instead of bf16");
    let said = refused(&mut export(&place, &["--out", "none", "--checkpoint", "step-5"]));
    assert_eq!(said, format!("error: runs/run/checkpoints has no checkpoint step-5; there is step-{best}, step-12\n"));
    place.resume("run", &set);
    assert_eq!(place.result("run"), finished);
}
