//! Rates that are measured and saved, and what is predicted with them.

use std::path::Path;
use std::process::Command;

/// Runs `oomb` with rates in a file of its own: status, output, errors.
fn oomb(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oomb"));
    let output = command
        .current_dir(folder)
        .env("OOMB_RATES", folder.join("kept/rates.json"))
        .args(args)
        .output()
        .expect("a program that runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a program that runs");
    (output.status.code().expect("a program that runs"), text(output.stdout), text(output.stderr))
}

const RUN: &str = "[model]\npreset = \"tiny\"\n[data]\ntrain = \"text.txt\"\ntokenizer = \"bytes\"\nsequence_tokens = 4096\n\
    [schedule]\nchunk_tokens = \"auto\"\n[optimizer]\nlr = 1e-3\n[run]\nout = \"run\"\nsteps = 1\ndevice = \"cpu\"\n";

#[test]
fn measured_rates_are_saved_and_used() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("run.toml"), RUN).unwrap();
    std::fs::write(folder.path().join("text.txt"), "The quick brown fox. ".repeat(300)).unwrap();
    let plan = ["plan", "--config", "run.toml"];
    let (code, stdout, stderr) = oomb(folder.path(), &plan);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("not known on cpu: oomb bench rates measures"), "{stdout}");

    let (code, stdout, stderr) = oomb(folder.path(), &["bench", "rates", "--device", "cpu", "--sample-seconds", "0.001"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("kept/rates.json"), "{stdout}");
    let path = folder.path().join("kept/rates.json");
    let saved: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(saved["cpu"]["products"].as_f64().unwrap() > 1e8, "{saved}");
    assert!(saved["cpu"]["attention"]["64"]["past"][1].as_f64().unwrap() > 1e6, "{saved}");

    let (_, stdout, _) = oomb(folder.path(), &plan);
    let line = stdout.lines().find(|line| line.starts_with("time ")).unwrap();
    assert!(line.contains(" s a step: products ") && line.contains("tokens/s (rates of cpu in "), "{line}");
    // A device whose memory is slow and whose products cost nothing takes the largest chunk: each writes the gradients once.
    let mut slow = saved.clone();
    (slow["cpu"]["memory"], slow["cpu"]["products"]) = (1e6.into(), 1e15.into());
    std::fs::write(&path, slow.to_string()).unwrap();
    let (code, stdout, stderr) = oomb(folder.path(), &["train", "--config", "run.toml"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("chunks of 4,096"), "{stdout}");

    for (text, problem) in
        [("{", "EOF"), ("{\"cpu\": {}}", "missing field"), (&saved.to_string().replace("\"link\":", "\"link\":-"), "not above 0")]
    {
        std::fs::write(&path, text).unwrap();
        let (code, _, stderr) = oomb(folder.path(), &plan);
        assert_eq!(code, 1);
        assert!(stderr.contains("rates.json does not hold rates: ") && stderr.contains(problem), "{stderr}");
    }
}

#[test]
fn a_gpu_that_is_not_here_is_taken_for_one_that_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let args =
        ["plan", "--model", "qwen2.5-7b", "--sequence-tokens", "64K", "--device-memory", "139GiB", "--host-memory", "110GiB"];
    let (code, stdout, stderr) = oomb(folder.path(), &[&args[..], &["--optimizer", "none"]].concat());
    assert_eq!(code, 0, "{stderr}");
    let line = stdout.lines().find(|line| line.starts_with("time ")).unwrap();
    // Measured: 6,290 tokens/s.
    let rate = line.split("; ").nth(1).unwrap().split(' ').next().unwrap().replace(',', "").parse::<f64>().unwrap();
    assert!((5_400.0..7_200.0).contains(&rate) && line.contains("built-in rates of NVIDIA H200"), "{line}");
}
