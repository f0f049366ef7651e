//! Folders of runs: new ones only, with the resolved configuration and a line per step.

use oomb::config::Config;
use oomb::metrics::{METRICS_FILE, MetricsFile, Record};
use oomb::run_folder;
use std::fs;
use std::path::Path;

fn config(out: &Path) -> Config {
    let text = "[model]\npreset = \"tiny\"\n[data]\ntrain = \"x\"\nsequence_tokens = 64\n[run]\nsteps = 1\n";
    Config::parse(text, "test", &[format!("run.out={}", out.display())]).expect("the configuration is right")
}

#[test]
fn a_new_folder_gets_the_resolved_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("runs/first"));
    run_folder::check_new(&config.run.out).unwrap();
    assert!(!config.run.out.exists(), "checking writes nothing");
    run_folder::create(&config).unwrap();
    let written = Config::load(&config.run.out.join("config.toml"), &[]).unwrap();
    assert_eq!(written, config);
}

#[test]
fn another_run_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("run"));
    let message = || run_folder::create(&config).unwrap_err().to_string().replace(&folder.path().display().to_string(), "DIR");
    fs::create_dir(&config.run.out).unwrap();
    for file in ["config.toml", METRICS_FILE] {
        fs::write(config.run.out.join(file), "old").unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(message(), @"DIR/run holds a run: go on with it by --resume, or set run.out to a new folder; nothing was written");
        }
        assert_eq!(fs::read_to_string(config.run.out.join(file)).unwrap(), "old");
        fs::remove_file(config.run.out.join(file)).unwrap();
    }
    fs::write(config.run.out.join("notes"), "").unwrap();
    insta::assert_snapshot!(message(), @"DIR/run is not empty: set run.out to a new folder; nothing was written");
    fs::remove_dir_all(&config.run.out).unwrap();
    fs::write(&config.run.out, "").unwrap();
    insta::assert_snapshot!(message(), @"DIR/run is a file: set run.out to a new folder; nothing was written");
}

#[test]
fn every_step_is_a_line_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (mut metrics, kept) = MetricsFile::open(folder.path(), 0).unwrap();
    assert_eq!(kept, 0);
    for step in 1..=3 {
        let record = Record {
            step,
            loss: 1.0 / 3.0,
            grad_norm: 2.0,
            lr: 3e-4,
            tokens: 10,
            seconds: 0.5,
            tokens_per_second: 20.0,
            device_bytes: 1 << 40,
            host_bytes: 0,
            in_bytes: 0,
            out_bytes: 0,
            page_hit_rate: None,
            epoch: 0.25,
            validation_loss: (step == 2).then_some(4.0),
            skipped: false,
        };
        metrics.append(&record).unwrap();
        let text = fs::read_to_string(folder.path().join(METRICS_FILE)).unwrap();
        assert_eq!(text.lines().count(), step);
        assert_eq!(serde_json::from_str::<Record>(text.lines().last().unwrap()).unwrap(), record);
    }
    let text = fs::read_to_string(folder.path().join(METRICS_FILE)).unwrap();
    insta::assert_snapshot!(text, @r#"
    {"step":1,"loss":0.3333333333333333,"grad_norm":2.0,"lr":0.0003,"tokens":10,"seconds":0.5,"tokens_per_second":20.0,"device_bytes":1099511627776,"host_bytes":0,"epoch":0.25}
    {"step":2,"loss":0.3333333333333333,"grad_norm":2.0,"lr":0.0003,"tokens":10,"seconds":0.5,"tokens_per_second":20.0,"device_bytes":1099511627776,"host_bytes":0,"epoch":0.25,"validation_loss":4.0}
    {"step":3,"loss":0.3333333333333333,"grad_norm":2.0,"lr":0.0003,"tokens":10,"seconds":0.5,"tokens_per_second":20.0,"device_bytes":1099511627776,"host_bytes":0,"epoch":0.25}
    "#);

    // A run that goes on after step 2: later lines and a half-written one go, whole ones stay as they are.
    let path = folder.path().join(METRICS_FILE);
    fs::write(&path, format!("{text}{}", &text[..40])).unwrap();
    let (mut metrics, kept) = MetricsFile::open(folder.path(), 2).unwrap();
    assert_eq!(kept, 2);
    metrics.sync().unwrap();
    let two: String = text.lines().take(2).map(|line| format!("{line}\n")).collect();
    assert_eq!(fs::read_to_string(&path).unwrap(), two);
}
