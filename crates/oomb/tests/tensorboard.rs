//! Event files are byte for byte those of TensorBoard's own writer (`scripts/golden_tensorboard.py`).

use oomb::metrics::{EventFile, Record};

#[test]
fn events_are_those_of_tensorboard() {
    let mut bytes = Vec::new();
    let mut events = EventFile::new(&mut bytes, 1.7e9).unwrap();
    for step in [1, 2, 200] {
        let record = Record {
            step,
            loss: 5.0 / step as f64,
            grad_norm: 1.5 * step as f64,
            lr: 3e-4,
            tokens: 65_536,
            seconds: 40.0,
            tokens_per_second: 1638.5,
            device_bytes: 3 << 29,
            host_bytes: 0,
            in_bytes: 0,
            out_bytes: 0,
            page_hit_rate: None,
            epoch: 0.25 * step as f64,
            skipped: false,
            validation_loss: (step == 200).then_some(4.75),
        };
        events.append_at(&record, 1.7e9 + step as f64).unwrap();
    }
    let golden = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tensorboard.tfevents")).unwrap();
    assert_eq!(bytes.len(), golden.len());
    assert!(bytes == golden, "first difference at byte {:?}", bytes.iter().zip(&golden).position(|(a, b)| a != b));
}
