//! The course of the learning rate, at the steps where it must have known values.

use oomb::config::Config;
use oomb::run::learning_rate;

fn rates(schedule: &str, min_lr: &str) -> Vec<f64> {
    let text = format!(
        "[model]\npreset = \"tiny\"\n[data]\ntrain = \"x\"\nsequence_tokens = 64\n[run]\nout = \"x\"\nsteps = 12\n\
         [optimizer]\nlr = 1.0\nwarmup_steps = 4\nschedule = \"{schedule}\"\n{min_lr}"
    );
    let config = Config::parse(&text, "test", &[]).expect("the configuration is right");
    (1..=12).map(|step| learning_rate(&config, step)).collect()
}

fn assert_near(rates: &[f64], wanted: &[f64]) {
    let near = rates.len() == wanted.len() && rates.iter().zip(wanted).all(|(rate, wanted)| (rate - wanted).abs() < 1e-12);
    assert!(near, "{rates:?}, wanted {wanted:?}");
}

#[test]
fn warm_up_then_constant_linear_or_cosine() {
    assert_near(&rates("constant", ""), &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    let linear = [0.25, 0.5, 0.75, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2];
    assert_near(&rates("linear", "min_lr = 0.2"), &linear);
    let cosine = rates("cosine", "min_lr = 0.2");
    assert_near(&[cosine[3], cosine[5], cosine[7], cosine[11]], &[1.0, 0.6 + 0.4 * 0.5_f64.sqrt(), 0.6, 0.2]);
}
