//! `oomb report`: one page, whole, whatever a run's folder holds.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use oomb::report::{self, RunFiles, html};
use std::fs;
use std::path::{Path, PathBuf};

/// A run of `steps` steps in `parent/name`, with everything that a run's folder may hold.
fn run(parent: &Path, name: &str, steps: usize) -> PathBuf {
    let folder = parent.join(name);
    fs::create_dir(&folder).unwrap();
    let line = |step: usize| {
        let (loss, validation) = (5.0 / step as f64, if step.is_multiple_of(5) { r#","validation_loss":4.5"# } else { "" });
        format!(
            r#"{{"step":{step},"loss":{loss},"grad_norm":{},"lr":0.001,"tokens":1024,"seconds":2.0,"tokens_per_second":512.0,"device_bytes":1048576,"host_bytes":2048,"epoch":0.1{validation}}}"#,
            100.0 / (step * step) as f64
        )
    };
    fs::write(folder.join("metrics.jsonl"), (1..=steps).map(|step| line(step) + "\n").collect::<String>()).unwrap();
    fs::write(folder.join("config.toml"), format!("[run]\nout = \"{name}\"\nseed = {steps}\n[kv]\npage_tokens = 16\n")).unwrap();
    fs::write(folder.join("plan.txt"), "buffer  tier\nweights  device <&>\n").unwrap();
    let buckets = r#"{"loss":3.0,"buckets":[{"from":0,"to":512,"loss":4.0},{"from":512,"to":1024,"loss":3.0},{"from":1024,"to":2048,"loss":null}]}"#;
    fs::write(folder.join("eval.json"), buckets).unwrap();
    folder
}

/// Tags of a page, which must nest; contents of script and style are not HTML.
fn check_nesting(page: &str) {
    const VOID: [&str; 6] = ["meta", "line", "path", "circle", "rect", "!doctype"];
    let mut open: Vec<String> = Vec::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if let Some(comment) = rest.strip_prefix("!--") {
            rest = &comment[comment.find("-->").unwrap()..];
            continue;
        }
        let tag = &rest[..rest.find('>').unwrap()];
        let name: String = tag.trim_start_matches('/').chars().take_while(|c| c.is_alphanumeric() || *c == '!').collect();
        if tag.starts_with('/') {
            assert_eq!(open.pop().as_deref(), Some(name.as_str()), "closed in {}", &rest[..rest.len().min(80)]);
        } else if !tag.ends_with('/') && !VOID.contains(&name.to_lowercase().as_str()) {
            open.push(name.clone());
        }
        if ["script", "style"].contains(&tag) || tag.starts_with("script ") {
            rest = &rest[rest.find(&format!("</{name}")).unwrap_or(0)..];
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
}

#[test]
fn a_page_shows_every_step_and_stands_alone() {
    let parent = tempfile::tempdir().unwrap();
    let page = html(&[RunFiles::open(&run(parent.path(), "first", 40)).unwrap()]);
    check_nesting(&page);
    for part in
        ["Loss", "Gradient norm", "Learning rate", "Throughput", "Memory by tier", "Loss by position", "Plan", "kv.page_tokens"]
    {
        assert!(page.contains(part), "no {part}");
    }
    for place in ["http:", "https:", "src=", "href=", "url("] {
        assert!(!page.contains(place), "the page asks for another file: {place}");
    }
    let data = page.split("application/json\">").nth(1).and_then(|text| text.split("</script>").next()).unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let steps: Vec<f64> = serde_json::from_value(data["series"][0]["x"].clone()).unwrap();
    assert_eq!(steps, (1..=40).map(f64::from).collect::<Vec<_>>());
    assert_eq!(data["series"][1]["y"].as_array().unwrap().len(), 8, "validation losses");
    let curve = page.split("<path class=\"line c0\" d=\"").nth(1).and_then(|text| text.split('"').next()).unwrap();
    assert_eq!(curve.matches(['M', 'L']).count(), 40, "the curve has every step");
}

#[test]
fn names_and_contents_cannot_break_the_page() {
    let parent = tempfile::tempdir().unwrap();
    let folder = run(parent.path(), "<b>&\"quoted\"<script>", 3);
    let page = html(&[RunFiles::open(&folder).unwrap()]);
    check_nesting(&page);
    assert!(page.contains("&lt;b&gt;&amp;&quot;quoted&quot;&lt;script&gt;") && page.contains("device &lt;&amp;&gt;"));
}

#[test]
fn several_runs_show_what_differs() {
    let parent = tempfile::tempdir().unwrap();
    let runs = [("a", 3), ("b", 6)].map(|(name, steps)| RunFiles::open(&run(parent.path(), name, steps)).unwrap());
    let page = html(&runs);
    check_nesting(&page);
    let table = page.split("Settings that differ").nth(1).and_then(|text| text.split("</table>").next()).unwrap();
    assert!(table.contains("run.seed") && table.contains(">3<") && table.contains(">6<"), "{table}");
    assert!(!table.contains("kv.page_tokens") && !table.contains("run.out"), "{table}");
    assert!(page.contains("path class=\"line c1\""), "the second curve has a colour of its own");
}

#[test]
fn what_a_killed_run_leaves_is_shown() {
    let parent = tempfile::tempdir().unwrap();
    let folder = run(parent.path(), "killed", 4);
    for file in ["plan.txt", "eval.json", "config.toml"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    // A step done again after a restart, one without numbers, and half a line.
    let mut lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    lines.push_str("{\"step\":4,\"loss\":9.0}\n{\"step\":5,\"loss\":null}\n{\"step\":6,\"lo");
    fs::write(folder.join("metrics.jsonl"), lines).unwrap();
    let read = RunFiles::open(&folder).unwrap();
    assert_eq!(read.steps.len(), 5);
    assert_eq!(read.series("loss").last(), Some(&(4.0, 9.0)));
    assert!(html(&[read]).contains("1 line(s) of metrics.jsonl could not be read"));
}

#[test]
fn refusals_name_what_to_give() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path();
    let refusal = |error: report::Error| error.to_string().replace(&dir.display().to_string(), "DIR");
    insta::assert_snapshot!(refusal(RunFiles::open(dir).unwrap_err()), @"DIR is not a run: it holds no metrics.jsonl; give the folder of a run (run.out of its configuration)");
    insta::assert_snapshot!(refusal(RunFiles::open(&dir.join("none")).unwrap_err()), @"DIR/none is not a run: there is no such folder; give the folder of a run (run.out of its configuration)");
    let (folder, mine) = (run(dir, "first", 2), dir.join("mine.html"));
    fs::write(&mine, "my page").unwrap();
    insta::assert_snapshot!(refusal(report::write(std::slice::from_ref(&folder), &mine).unwrap_err()), @"DIR/mine.html is there and is not a report: name another file with --out; nothing was written");
    assert_eq!(fs::read_to_string(&mine).unwrap(), "my page");
    for _ in 0..2 {
        let output = Command::cargo_bin("oomb").unwrap().current_dir(dir).args(["report", "first"]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "first/report.html\n");
    }
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let oomb = |args: &[&str]| {
        let output = Command::cargo_bin("oomb").unwrap().args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    oomb(&["man", "--out", folder.path().to_str().unwrap()]);
    let texts = ["bash", "zsh", "fish"].map(|shell| oomb(&["completions", shell]));
    for command in ["prepare", "plan", "train", "eval", "export", "report", "bench", "doctor", "completions", "man"] {
        assert!(texts.iter().all(|text| text.contains(command)), "{command}");
        let page = fs::read_to_string(folder.path().join(format!("oomb-{command}.1"))).unwrap();
        assert!(page.contains("Examples") || command == "bench", "{command} has no examples: {page}");
    }
}
