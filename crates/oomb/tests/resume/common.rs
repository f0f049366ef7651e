//! A folder with a small run in it, and processes that train there.

use oomb::metrics::Record;
use oomb::state::Checkpoints;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Eleven windows of 100 tokens, so that step 12 begins the second epoch.
const CONFIG: &str = r#"
[model]
preset = "tiny"
[data]
train = "text.txt"
validation = "text.txt"
tokenizer = "bytes"
sequence_tokens = 100
[schedule]
chunk_tokens = 32
[kv]
page_tokens = 16
[optimizer]
lr = 3e-3
warmup_steps = 3
[run]
out = "runs/first"
steps = 30
device = "cpu"
threads = 1
checkpoint_every = 5
keep_checkpoints = 20
validate_every = 7
validation_sequences = 2
"#;

pub struct Workplace {
    folder: tempfile::TempDir,
}

/// A folder with a configuration and some text.
pub fn workplace() -> Workplace {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.toml"), CONFIG).unwrap();
    fs::write(folder.path().join("text.txt"), &novel()[..1050]).unwrap();
    Workplace { folder }
}

pub fn novel() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/emma.txt")).unwrap()
}

/// Everything a run is judged by: its steps, its model and the state of its optimizer.
#[derive(PartialEq)]
pub struct Result {
    steps: Vec<String>,
    model: Vec<u8>,
    optimizer: Vec<u8>,
}

impl std::fmt::Debug for Result {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let crc = |bytes| crc32fast::hash(bytes);
        write!(f, "{:#?} model {:08x} optimizer {:08x}", self.steps, crc(&self.model), crc(&self.optimizer))
    }
}

impl Workplace {
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn run(&self, name: &str) -> PathBuf {
        self.path().join("runs").join(name)
    }

    pub fn checkpoints(&self, run: &str) -> Checkpoints {
        Checkpoints::of(&self.run(run))
    }

    /// `oomb train --config run.toml --set run.out=runs/NAME` with overrides.
    pub fn train(&self, run: &str, set: &[&str], resume: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oomb"));
        command.current_dir(self.path()).args(["train", "--config", "run.toml", "--set", &format!("run.out=runs/{run}")]);
        command.args(set.iter().flat_map(|set| ["--set", *set])).args(resume);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// A run from its beginning to its end.
    pub fn whole(&self, run: &str, set: &[&str]) -> Result {
        succeed(&mut self.train(run, set, &[]));
        self.result(run)
    }

    /// Goes on, to the end; what it said on stderr.
    pub fn resume(&self, run: &str, set: &[&str]) -> String {
        succeed(&mut self.train(run, set, &["--resume"])).1
    }

    pub fn metrics(&self, run: &str) -> Vec<Record> {
        let text = fs::read_to_string(self.run(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn result(&self, run: &str) -> Result {
        let steps = self.metrics(run);
        assert!(steps.iter().map(|record| record.step).eq(1..=steps.len()), "one line for each step: {steps:?}");
        let bits = |record: Record| {
            let numbers = [record.loss, record.grad_norm, record.lr, record.epoch].map(f64::to_bits);
            format!("{} {numbers:x?} {:?}", record.step, record.validation_loss.map(f64::to_bits))
        };
        let newest = self.checkpoints(run).newest().unwrap().checkpoint.unwrap();
        assert_eq!(newest.saved.step, steps.len());
        Result {
            steps: steps.into_iter().map(bits).collect(),
            model: fs::read(self.run(run).join("model/model.safetensors")).unwrap(),
            optimizer: fs::read(newest.folder.join("optimizer.safetensors")).unwrap(),
        }
    }

    /// As if the run had died after the checkpoint of `step`: later ones and the model are not there yet.
    pub fn rewind(&self, run: &str, step: usize) {
        let checkpoints = self.checkpoints(run);
        for later in checkpoints.steps().unwrap().into_iter().filter(|&later| later > step) {
            fs::remove_dir_all(checkpoints.path(later)).unwrap();
        }
        let _ = fs::remove_dir_all(self.run(run).join("model"));
    }

    /// Files of a run with their contents.
    pub fn contents(&self, run: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let (mut found, mut open) = (Vec::new(), vec![self.run(run)]);
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { open.push(path) } else { found.push((path.clone(), fs::read(&path).unwrap())) }
            }
        }
        found.sort();
        found
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output and standard error of a command that succeeds.
pub fn succeed(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{command:?}: {}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

/// What a command says that fails.
pub fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{command:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

/// Sends a signal by its name.
pub fn send(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
}

/// Starts the command and sends `signal` as soon as `metrics.jsonl` of `run` has a line of `step`.
pub fn stop_at(place: &Workplace, mut command: Command, run: &str, step: usize, signal: &str) -> Output {
    let mut child = command.spawn().unwrap();
    let line = format!("{{\"step\":{step},");
    let path = place.run(run).join("metrics.jsonl");
    let reached = || fs::read_to_string(&path).is_ok_and(|text| text.lines().any(|known| known.starts_with(&line)));
    while !reached() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_micros(500));
    }
    send(&child, signal);
    child.wait_with_output().unwrap()
}

/// SplitMix64, seeded by the clock and printed, so that a failure can be looked into.
pub struct Random(u64);

impl Random {
    pub fn fresh(test: &str) -> Self {
        let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = std::env::var("OOMB_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(clock);
        eprintln!("{test}: OOMB_TEST_SEED={seed}");
        Self(seed)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}
