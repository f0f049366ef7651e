//! The course of the learning rate, at the steps where it must have known values.

use oomb::config::Config;
use oomb::run::learning_rate;

fn rates(schedule: &str, warmup_steps: usize, min_lr: &str) -> Vec<f64> {
    let text = format!(
        "[model]\npreset = \"tiny\"\n[data]\ntrain = \"x\"\nsequence_tokens = 64\n[run]\nout = \"x\"\nsteps = 12\n\
         [optimizer]\nlr = 1.0\nwarmup_steps = {warmup_steps}\nschedule = \"{schedule}\"\n{min_lr}"
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
    assert_near(&rates("constant", 4, ""), &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    // Step 13, the first that is not done, would have min_lr.
    let linear = [0.25, 0.5, 0.75, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2];
    assert_near(&rates("linear", 4, "min_lr = 0.1"), &linear);
    let cosine = rates("cosine", 4, "min_lr = 0.2");
    assert_near(&[cosine[3], cosine[6], cosine[9]], &[1.0, 0.8, 0.4]);
}

/// What `transformers.get_{cosine,linear}_schedule_with_warmup(optimizer, 0, 12)` gives, and `(optimizer, 4, 13)` from its
/// second step on: its warm-up has a first step at rate 0, ours has not.
#[test]
fn the_same_rates_as_transformers() {
    let cosine = [
        1.0,
        0.9829629131445341,
        0.9330127018922194,
        0.8535533905932737,
        0.75,
        0.6294095225512604,
        0.5,
        0.3705904774487396,
        0.2500000000000001,
        0.14644660940672627,
        0.06698729810778065,
        0.0170370868554659,
    ];
    assert_near(&rates("cosine", 0, ""), &cosine);
    let warmed = [
        0.25,
        0.5,
        0.75,
        1.0,
        0.9698463103929542,
        0.883022221559489,
        0.75,
        0.5868240888334653,
        0.41317591116653485,
        0.2500000000000001,
        0.11697777844051105,
        0.03015368960704584,
    ];
    assert_near(&rates("cosine", 4, ""), &warmed);
    let twelfths: Vec<f64> = (1..=12).rev().map(|left| f64::from(left) / 12.0).collect();
    assert_near(&rates("linear", 0, ""), &twelfths);
    assert_near(&rates("linear", 4, "")[3..], &(1..=9).rev().map(|left| f64::from(left) / 9.0).collect::<Vec<_>>());
}
