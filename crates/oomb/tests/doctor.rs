//! `oomb doctor`: the CPU passes in every precision, the report names everything, and no op is left out.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use assert_cmd::Command;
use oomb::doctor::{Comparison, cases, compare};
use oomb_device::DType;
use oomb_device::cpu::{Cpu, CpuOptions, Real};

/// All comparisons of a CPU device of that kind, every one of which must be fine.
fn healthy(real: Real, compute_dtype: DType) -> Vec<Comparison> {
    let device = Cpu::new(CpuOptions { real, compute_dtype, ..CpuOptions::default() });
    let comparisons = compare(&device, &cases()).unwrap();
    let wrong: Vec<_> = comparisons.iter().filter(|comparison| !comparison.is_fine()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    comparisons
}

#[test]
fn the_cpu_is_healthy_in_every_precision() {
    let in_bf16 = healthy(Real::F32, DType::Bf16);
    let in_f32 = healthy(Real::F32, DType::F32);
    assert_eq!(in_bf16.len(), in_f32.len());
    // Activations that are rounded must differ from the exact ones: else nothing was compared.
    for (op, output) in
        [("linear_forward", "y"), ("attention_forward", "o"), ("qkv_backward", "dqkv"), ("swiglu_backward", "gate, up")]
    {
        let errors: Vec<_> = in_bf16.iter().filter(|found| found.op == op && found.output == output).collect();
        let rounded = errors.iter().all(|found| found.error < 5e-3) && errors.iter().any(|found| found.error > 1e-3);
        assert!(rounded, "{errors:#?}");
    }
}

#[test]
fn every_op_of_the_contract_is_compared() {
    let comparisons = compare(&Cpu::default(), &cases()).unwrap();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/src/ops");
    let mut ops = 0;
    for entry in std::fs::read_dir(root).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for op in text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")) {
            let name: String = op.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            // `clone` is not an op; `check_attention` is a question asked before any op.
            if ["clone", "check_attention"].contains(&name.as_str()) {
                continue;
            }
            ops += 1;
            let compared = comparisons.iter().any(|comparison| comparison.op.split(',').next() == Some(name.as_str()));
            assert!(compared, "{name} is not compared");
        }
    }
    assert!(ops >= 20, "{ops} ops found");
}

#[test]
fn the_command_reports_and_succeeds() {
    let output = Command::cargo_bin("oomb").unwrap().args(["doctor", "--device", "cpu"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for part in ["memory", "processor", "compared with the CPU in f64", "attention_backward, grouped", "adamw", ", 0 wrong"] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains("WRONG"), "{text}");
}
