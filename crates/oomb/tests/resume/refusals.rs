//! Which settings may change when a run goes on, and that everything else goes on exactly.

use super::common::*;

/// bf16 with f32 masters, every kind of optimizer state, several sequences a step, half a chunk kept, windows: nothing of it is lost in a checkpoint.
#[test]
fn every_kind_of_run_goes_on_exactly() {
    let place = workplace();
    let kinds: [&[&str]; 7] = [
        &[],
        &["run.compute_dtype=bf16", "kv.grad_dtype=bf16", "optimizer.decay_norms_and_biases=true"],
        &["data.sequences_per_step=3", "schedule.keep=inputs", "optimizer.schedule=linear"],
        &["kv.selection=window:40", "optimizer.schedule=constant", "optimizer.clip_norm=off", "kv.group_pages=1"],
        &["run.compute_dtype=bf16", "optimizer.state_dtype=int8", "optimizer.master_weights=false"],
        &["run.compute_dtype=bf16", "optimizer.state_dtype=bf16", "optimizer.placement=host"],
        &["run.compute_dtype=bf16", "optimizer.state_dtype=int8", "optimizer.placement=host", "run.seed=7"],
    ];
    for (index, kind) in kinds.iter().enumerate() {
        let run = format!("run{index}");
        let reference = place.whole(&run, kind);
        // In the first epoch, and in a later one.
        for step in [20, 10] {
            place.rewind(&run, step);
            place.resume(&run, kind);
            assert_eq!(place.result(&run), reference, "{kind:?} after step {step}");
        }
    }
}

#[test]
fn a_changed_configuration_is_refused_with_both_values() {
    let place = workplace();
    place.whole("run", &[]);
    place.rewind("run", 20);
    let before = place.contents("run");
    let refuse = |set: &[&str]| {
        let said = refused(&mut place.train("run", set, &["--resume"]));
        assert_eq!(place.contents("run"), before, "nothing is touched");
        said
    };
    insta::assert_snapshot!(refuse(&["optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.99]", "run.log_every=2"]), @"
    error: this is not the configuration with which runs/run was trained:
      optimizer.betas is [0.9, 0.99] now, it was [0.9, 0.95]
      optimizer.lr is 0.001 now, it was 0.003
    set it back, or start a new run from the weights: `oomb export` them and set model.path to the export
    ");
    insta::assert_snapshot!(refuse(&["run.steps=40"]), @"
    error: this is not the configuration with which runs/run was trained:
      run.steps is 40 now, it was 30
    set it back, or start a new run from the weights: `oomb export` them and set model.path to the export; run.steps may change only with a constant learning rate: otherwise it changes the rate of every step
    ");
    for change in
        ["run.seed=1", "data.sequences_per_step=2", "kv.selection=window:64", "kv.grad_dtype=bf16", "data.sequence_tokens=99"]
    {
        let said = refuse(&[change]);
        assert!(said.contains(&format!("  {} is ", change.split('=').next().unwrap())), "{said}");
    }
    std::fs::write(place.path().join("text.txt"), &novel()[1..1051]).unwrap();
    let said = refuse(&[]);
    assert!(said.starts_with("error: data.train is not what runs/run/checkpoints/step-20 was trained on (CRC "), "{said}");
}

#[test]
fn harmless_changes_are_named_and_change_nothing() {
    let place = workplace();
    let reference = place.whole("run", &[]);
    place.rewind("run", 20);
    std::fs::rename(place.path().join("text.txt"), place.path().join("moved.txt")).unwrap();
    let set = [
        "run.log_every=3",
        "run.checkpoint_every=4",
        "run.threads=2",
        "run.on_not_finite=skip",
        "kv.prefetch_groups=1",
        "data.train=moved.txt",
        "data.validation=moved.txt",
    ];
    insta::assert_snapshot!(place.resume("run", &set), @r#"
    note: data.train is "moved.txt" now, it was "text.txt" (the tokens are compared by checksum)
    note: data.validation is "moved.txt" now, it was "text.txt" (validation trains nothing; the best loss is sought anew)
    note: kv.prefetch_groups is 1 now, it was 2 (when pages move)
    note: run.checkpoint_every is 4 now, it was 5 (only when state is written)
    note: run.log_every is 3 now, it was 1 (only what is shown)
    note: run.on_not_finite is "skip" now, it was "stop" (only what happens to steps that would end the run)
    note: run.threads is 2 now, it was 1 (sums have a fixed order, whatever the threads)
    "#);
    assert_eq!(place.result("run"), reference);
    let config = std::fs::read_to_string(place.run("run").join("config.toml")).unwrap();
    assert!(config.contains("checkpoint_every = 4\n"), "{config}");
}

#[test]
fn a_constant_rate_lets_a_run_be_longer() {
    let place = workplace();
    let constant = ["optimizer.schedule=constant", "run.validate_every=10"];
    let reference = place.whole("long", &constant);
    let short = [&constant[..], &["run.steps=20"]].concat();
    place.whole("short", &short);
    let said = place.resume("short", &constant);
    assert_eq!(said, "note: run.steps is 30 now, it was 20 (with a constant learning rate)\n");
    assert_eq!(place.result("short"), reference);
    let said = refused(&mut place.train("short", &short, &["--resume"]));
    insta::assert_snapshot!(said, @"
    error: this is not the configuration with which runs/short was trained:
      run.steps is 20 now, but 30 steps are done
    set run.steps to 30 or more
    ");
}

/// Where the optimizer's state lives may change; how it is stored may not, whether said or chosen.
#[test]
fn the_kind_of_optimizer_state_stays() {
    let place = workplace();
    let bf16 = ["run.compute_dtype=bf16", "run.steps=12"];
    let with = |set: &[&'static str]| [&bf16[..], set].concat();
    let reference = place.whole("run", &with(&["optimizer.state_dtype=bf16"]));
    place.rewind("run", 10);
    let refuse = |set: &[&'static str]| {
        let before = place.contents("run");
        let said = refused(&mut place.train("run", &with(set), &["--resume"]));
        assert_eq!(place.contents("run"), before, "nothing is touched");
        said
    };
    insta::assert_snapshot!(refuse(&["optimizer.state_dtype=int8"]), @r#"
    error: this is not the configuration with which runs/run was trained:
      optimizer.state_dtype is "int8" now, it was "bf16"
    set it back, or start a new run from the weights: `oomb export` them and set model.path to the export
    "#);
    let said = refuse(&["optimizer.state_dtype=bf16", "optimizer.master_weights=false"]);
    assert!(
        said.contains("bf16 of f32 weights, this run was planned with an optimizer's state in bf16 of bf16 weights"),
        "{said}"
    );
    // Left open it is what it was, whatever would fit now.
    let said = place.resume("run", &with(&["optimizer.placement=host"]));
    assert_eq!(said, "note: optimizer.placement is \"host\" now, it was \"auto\" (where state lives)\n");
    assert_eq!(place.result("run"), reference);
}

/// Checkpoints written before there was a choice hold f32 moments and f32 weights.
#[test]
fn older_checkpoints_have_f32_state() {
    let place = workplace();
    place.whole("run", &["run.compute_dtype=bf16", "run.steps=5"]);
    let saved = place.checkpoints("run").newest().unwrap().checkpoint.unwrap().saved;
    let mut older = serde_json::to_value(&saved).unwrap();
    for key in ["moments", "f32_weights"] {
        assert!(older.as_object_mut().unwrap().remove(key).is_some());
    }
    assert_eq!(serde_json::from_value::<oomb::state::Saved>(older).unwrap(), saved);
}
