//! Processes killed at random moments.

use super::common::*;
use std::io::{BufRead, BufReader};
use std::process::ChildStdout;
use std::time::{Duration, Instant};

/// Killed twice and terminated once, in the first, second and third epoch, and resumed each time.
#[test]
fn killed_twice_and_terminated_once_is_as_never_interrupted() {
    let place = workplace();
    let mut random = Random::fresh("killed_twice");
    let set = ["data.sequence_tokens=95", "run.steps=60"];
    let reference = place.whole("reference", &set);
    for (signal, from) in [("KILL", 1), ("KILL", 14), ("TERM", 26)] {
        let step = from + random.below(9) as usize;
        let resume: &[&str] = if from == 1 { &[] } else { &["--resume"] };
        let output = stop_at(&place, place.train("killed", &set, resume), "killed", step, signal);
        if signal == "TERM" {
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(143), "{said}");
            assert!(
                said.contains("SIGTERM: this step is finished, then a checkpoint is saved; once more ends at once"),
                "{said}"
            );
            let saved = place.checkpoints("killed").newest().unwrap().checkpoint.unwrap().saved.step;
            assert!(saved >= step, "saved at {saved}, stopped at {step}");
            let command = "go on with: oomb train --config run.toml --set run.out=runs/killed --set data.sequence_tokens=95 \
                           --set run.steps=60 --resume";
            let message = format!("step {saved} is done and saved in runs/killed/checkpoints/step-{saved}\n{command}\n");
            assert!(said.ends_with(&message), "{said}");
        } else {
            assert_eq!(output.status.code(), None, "killed: {}", text(&output.stderr));
        }
    }
    place.resume("killed", &set);
    assert_eq!(place.result("killed"), reference);
    // What an evaluation or another program sees is the same too.
    assert!(place.metrics("killed").iter().any(|record| record.validation_loss.is_some()));
}

/// Thirty kills, most of them while a checkpoint is written or an old one removed: there is always one, it is intact, and
/// none that was there is lost.
#[test]
fn thirty_kills_lose_no_checkpoint() {
    let place = workplace();
    let mut random = Random::fresh("thirty_kills");
    let set = ["run.checkpoint_every=1", "run.steps=90", "run.keep_checkpoints=3"];
    let reference = place.whole("reference", &set);
    let (mut kills, mut newest) = (0, 0);
    while kills < 30 {
        let mut child = place.train("killed", &set, &["--resume"]).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        // One of five before anything is done, the others in the middle of training.
        if random.below(5) > 0 {
            wait_for(&mut lines, "step ");
        }
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        child.kill().unwrap();
        let ended = child.wait().unwrap().code();
        assert!(ended.is_none() || ended == Some(0), "exit code {ended:?}");
        kills += usize::from(ended.is_none());

        let checkpoints = place.checkpoints("killed");
        let steps = checkpoints.steps().unwrap();
        assert!(steps.iter().all(|&step| checkpoints.open(step).is_ok()), "after {kills} kills, one of {steps:?} is damaged");
        let last = steps.last().copied().unwrap_or(0);
        assert!(last >= newest, "after {kills} kills the newest is {last}, it was {newest}");
        newest = last;
        if ended == Some(0) {
            assert_eq!(place.result("killed"), reference);
            std::fs::remove_dir_all(place.run("killed")).unwrap();
            newest = 0;
        }
    }
    place.resume("killed", &set);
    assert_eq!(place.result("killed"), reference);
    let left: Vec<_> = std::fs::read_dir(place.run("killed")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 7, "nothing unfinished is left: {left:?}");
    assert!(place.checkpoints("killed").steps().unwrap().len() <= 4);
}

fn wait_for(lines: &mut BufReader<ChildStdout>, start: &str) {
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 && !line.starts_with(start) {
        line.clear();
    }
}

/// A step of seconds: the first signal waits for its end, the second does not.
#[test]
fn a_second_signal_ends_at_once() {
    let place = workplace();
    std::fs::write(place.path().join("text.txt"), &novel()[..70_000]).unwrap();
    let set = ["data.sequence_tokens=65536", "schedule.chunk_tokens=4096"];
    let mut child = place.train("long", &set, &[]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    wait_for(&mut lines, "115,136 parameters");
    std::thread::sleep(Duration::from_millis(100));
    send(&child, "INT");
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.starts_with("SIGINT: "), "{line}");
    assert!(child.try_wait().unwrap().is_none(), "the step goes on");
    let before = Instant::now();
    send(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert!(place.checkpoints("long").steps().unwrap().is_empty(), "nothing was saved");
    // Without a checkpoint the run begins again.
    assert!(place.run("long").join("config.toml").exists());
}

/// Two processes never train in one folder.
#[test]
fn one_process_a_folder() {
    let place = workplace();
    let mut first = place.train("one", &["run.steps=100000", "run.checkpoint_every=off"], &[]).spawn().unwrap();
    let mut lines = BufReader::new(first.stdout.take().unwrap());
    wait_for(&mut lines, "step ");
    let said = refused(&mut place.train("one", &["run.steps=100000", "run.checkpoint_every=off"], &["--resume"]));
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(said.ends_with("error: another process trains in runs/one now\n"), "{said}");
}
