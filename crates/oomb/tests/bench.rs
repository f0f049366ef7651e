//! `oomb bench` on the CPU at sizes that take no time: every figure is there, sums are right, mistakes are named.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use serde_json::Value;

/// Runs `oomb bench`, and returns what it printed and wrote.
fn bench(args: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let output = Command::cargo_bin("oomb")
        .unwrap()
        .args([&["bench"], args, &["--device", "cpu", "--json", json.to_str().unwrap()]].concat())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    (String::from_utf8(output.stdout).unwrap(), json)
}

fn refused(args: &[&str]) -> (i32, String) {
    let output = Command::cargo_bin("oomb").unwrap().arg("bench").args(args).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// `(name, direction)` of every row, each with a rate above 0 between its own bounds.
fn rows(json: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let number = |value: &Value| value.as_f64().unwrap();
    let rows = json["rows"].as_array().unwrap();
    rows.iter()
        .map(|row| {
            let ms = &row["milliseconds"];
            assert!(number(&row["rate"]) > 0.0 && number(&ms["min"]) > 0.0, "{row}");
            assert!(number(&ms["min"]) <= number(&ms["median"]) && number(&ms["median"]) <= number(&ms["max"]), "{row}");
            assert!(row["ceiling"].is_null() && row["share"].is_null(), "no ceiling is known for a CPU: {row}");
            (text(&row["name"]), text(&row["direction"]))
        })
        .collect()
}

#[test]
fn gemm_measures_five_linears_three_ways() {
    let (text, json) = bench(&["gemm", "--model", "tiny", "--tokens", "64", "--sample-seconds", "0.002"]);
    let rows = rows(&json);
    let expected: Vec<_> = ["qkv", "o", "gate_up", "down", "head"]
        .iter()
        .flat_map(|name| ["forward", "backward input", "backward weight"].map(|way| ((*name).to_owned(), way.to_owned())))
        .collect();
    assert_eq!(rows, expected);
    assert!(text.contains("64 x 384 x 64") && text.contains("TFLOP/s"), "{text}");
    let row = &json["rows"][6];
    let flop = row["rate"].as_f64().unwrap() * 1e12 * row["milliseconds"]["median"].as_f64().unwrap() / 1e3;
    assert!((flop / (2.0 * 64.0 * 384.0 * 64.0) - 1.0).abs() < 1e-9, "{flop}");
}

#[test]
fn attention_measures_squares_pasts_and_windows_in_groups() {
    let heads = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--sample-seconds", "0.002"];
    let both = [("attention", "forward"), ("attention", "backward")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    for (case, pairs) in [
        (vec!["--keys", "200"], 200.0 * 201.0 / 2.0),
        (vec!["--keys", "500", "--queries", "100", "--group-pages", "2"], 100.0 * 400.0 + 100.0 * 101.0 / 2.0),
        (vec!["--keys", "500", "--queries", "100", "--window", "20", "--page-tokens", "32"], 100.0 * 20.0),
    ] {
        let (_, json) = bench(&[&["attention"], &heads[..], &case].concat());
        assert_eq!(rows(&json), both);
        for (row, flop) in json["rows"].as_array().unwrap().iter().zip([4.0, 10.0]) {
            let counted = row["rate"].as_f64().unwrap() * 1e12 * row["milliseconds"]["median"].as_f64().unwrap() / 1e3;
            assert!((counted / (flop * 4.0 * 16.0 * pairs) - 1.0).abs() < 1e-9, "{case:?}: {counted}");
        }
    }
}

#[test]
fn copy_measures_each_piece_each_way() {
    let (text, json) = bench(&["copy", "--total", "1MiB", "--piece", "64KiB", "--piece", "8MiB", "--sample-seconds", "0.002"]);
    let directions: Vec<_> = rows(&json).into_iter().map(|(_, direction)| direction).collect();
    assert_eq!(directions, ["in", "out", "both", "in", "out", "both", "within the device"]);
    // A piece is no larger than the whole.
    assert!(text.contains("64.00 KiB") && text.contains("1.00 MiB") && !text.contains("8.00 MiB"), "{text}");
}

#[test]
fn step_allocates_as_planned_and_streams_within_a_budget() {
    let size =
        ["step", "--model", "tiny", "--sequence-tokens", "512", "--chunk-tokens", "128", "--repeat", "2", "--page-tokens", "32"];
    let (text, whole) = bench(&[&size[..], &["--sequences", "2", "--optimizer", "adamw", "--keep", "inputs"]].concat());
    assert!(text.contains("2 x 512 tokens") && text.contains("keep inputs"), "{text}");
    assert_eq!(whole["planned_device_bytes"], whole["allocated_device_bytes"]);
    assert_eq!(whole["in_bytes_per_step"], 0);
    let number = |json: &Value, key: &str| json["tokens_per_second"][key].as_f64().unwrap();
    assert!(0.0 < number(&whole, "min") && number(&whole, "min") <= number(&whole, "max"));

    let budget = ["--device-budget", "256KiB", "--group-pages", "1", "--prefetch-groups", "1", "--plan"];
    let (text, streamed) = bench(&[&size[..], &budget].concat());
    assert!(text.contains("kv.pages.host"), "{text}");
    assert_eq!(streamed["planned_device_bytes"], streamed["allocated_device_bytes"]);
    assert!(streamed["in_bytes_per_step"].as_u64().unwrap() > 0 && streamed["out_bytes_per_step"].as_u64().unwrap() > 0);
    let one_page = ["--group-pages", "1", "--offload"];
    let (text, on) = bench(&[&size[..], &one_page, &["on"]].concat());
    let (in_bytes, hits) = (on["in_bytes_per_step"].as_u64().unwrap(), on["page_hit_rate"].as_f64().unwrap());
    assert!(in_bytes >= streamed["in_bytes_per_step"].as_u64().unwrap() && hits < 1.0, "{in_bytes} {hits}");
    assert!(text.contains("of the pages read ") && text.contains("0 of 16 groups"), "{text}");
    let (_, off) = bench(&[&size[..], &one_page, &["off"]].concat());
    assert_eq!((&off["in_bytes_per_step"], &off["page_hit_rate"]), (&0.into(), &1.0.into()));
    let (_, resident) = bench(&size);
    // Same seed, same tokens and weights: where pages live changes nothing but the order of f32 sums over groups.
    for key in ["loss", "grad_norm"] {
        let (a, b) = (streamed[key].as_f64().unwrap(), resident[key].as_f64().unwrap());
        assert!((a - b).abs() < 1e-6 * b, "{key}: {a} and {b}");
    }
}

#[test]
fn step_updates_with_the_state_that_is_asked_for() {
    let size =
        ["step", "--model", "tiny", "--sequence-tokens", "64", "--chunk-tokens", "64", "--page-tokens", "32", "--repeat", "1"];
    let optimizer = ["--optimizer", "adamw", "--optimizer-state", "int8", "--master-weights", "false"];
    let run = |placement: &str| bench(&[&size[..], &optimizer, &["--optimizer-placement", placement]].concat());
    let ((text, device), (_, host)) = (run("device"), run("host"));
    assert!(text.contains("optimizer        int8 states, on the device; update "), "{text}");
    assert_eq!(host["optimizer_state"], "int8 states, streamed from the host");
    for json in [&device, &host] {
        assert_eq!(json["planned_device_bytes"], json["allocated_device_bytes"]);
        assert_eq!(json["grad_norm"], device["grad_norm"], "the second step starts from the same weights");
        assert!(json["update_seconds"].as_f64().unwrap() > 0.0, "{json}");
    }
    let moved = ["in_bytes_per_step", "out_bytes_per_step"].map(|key| host[key].as_u64().unwrap());
    assert_eq!(moved, [host["update_bytes"].as_u64().unwrap() / 2; 2]);
    assert_eq!(host["pinned_bytes"], moved[0]);
}

#[test]
fn mistakes_are_named() {
    let cases: [(&[&str], &str); 6] = [
        (&["gemm", "--model", "qwen2.5-7"], "did you mean \"qwen2.5-7b\"?"),
        (&["attention", "--keys", "5", "--queries", "9"], "--queries 9 is more than --keys 5"),
        (&["attention", "--heads", "5", "--kv-heads", "2", "--head-dim", "8"], "--heads 5 is not a multiple of --kv-heads 2"),
        (&["step", "--chunk-tokens", "100"], "--chunk-tokens 100 is not a multiple of --page-tokens 128"),
        (&["copy", "--json", "no/such/folder/a.json"], "there is no folder no/such/folder"),
        (&["gemm", "--sample-seconds", "nan"], "--sample-seconds"),
    ];
    for (args, message) in cases {
        let (code, stderr) = refused(args);
        assert!(code != 0 && stderr.contains(message), "{args:?}: {code}, {stderr}");
    }
}
