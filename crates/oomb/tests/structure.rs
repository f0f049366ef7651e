//! Rules of the architecture that a compiler does not hold: import direction, the schedule's length, where unsafe is.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Modules of the crate in import order: each may name those after it, and itself.
const ORDER: [(&str, &[&str]); 23] = [
    (
        "cli",
        &[
            "bench",
            "doctor",
            "config",
            "checkpoint",
            "data",
            "engine",
            "metrics",
            "model",
            "plan",
            "rates",
            "run",
            "report",
            "run_folder",
            "state",
            "train",
            "kv",
            "generate",
            "plot",
            "positions",
            "tasks",
        ],
    ),
    ("run", &["config", "checkpoint", "data", "engine", "kv", "model", "plan", "rates", "run_folder", "state", "train"]),
    ("report", &["config", "metrics", "run_folder"]),
    ("doctor", &["config", "random"]),
    ("bench", &["config", "data", "engine", "kv", "model", "plan", "random", "train"]),
    ("train", &["data", "engine", "model", "schedule"]),
    ("generate", &["config", "data", "engine", "random", "schedule"]),
    ("schedule", &["engine", "kv", "model"]),
    ("engine", &["data", "kv", "model", "plan"]),
    ("rates", &["plan"]),
    ("plan", &["config", "kv", "model"]),
    ("config", &["model", "kv"]),
    ("state", &["checkpoint", "config", "data", "model", "run_folder"]),
    ("checkpoint", &["model"]),
    ("metrics", &["config"]),
    ("run_folder", &["config", "metrics"]),
    ("data", &["config", "random"]),
    ("positions", &["plot"]),
    ("tasks", &["data", "plot", "random"]),
    ("plot", &[]),
    ("model", &["random"]),
    ("random", &[]),
    ("kv", &[]),
];

#[test]
fn imports_run_one_way() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for path in sources(&source) {
        let relative = path.strip_prefix(&source).unwrap();
        let module = relative.components().next().unwrap().as_os_str().to_string_lossy().replace(".rs", "");
        if ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let (_, allowed) = ORDER.iter().find(|(name, _)| *name == module).unwrap_or_else(|| panic!("{module} has no rule"));
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let mut rest = line;
            while let Some(at) = rest.find("crate::") {
                rest = &rest[at + 7..];
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                seen += 1;
                let fine = name == module || allowed.contains(&name.as_str());
                assert!(fine, "{}:{}: {module} must not import {name}", relative.display(), number + 1);
            }
        }
    }
    assert!(seen > 20, "the test reads imports: {seen} found");
}

#[test]
fn the_schedule_stays_a_page() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/schedule.rs");
    let lines = fs::read_to_string(path).unwrap().lines().count();
    assert!(lines <= 200, "schedule.rs has {lines} lines");
}

#[test]
fn unsafe_and_cuda_stay_in_the_device_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(fs::read_to_string(root.join("src/lib.rs")).unwrap().contains("#![forbid(unsafe_code)]"));
    assert!(fs::read_to_string(root.join("src/main.rs")).unwrap().contains("#![forbid(unsafe_code)]"));
    for path in sources(&root.join("src")) {
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("cudarc"), "{}", path.display());
    }
}
