//! Numbers that go wrong.

use super::common::*;

#[test]
fn weights_that_explode_stop_the_run_and_leave_its_last_checkpoint() {
    let place = workplace();
    let set = ["run.checkpoint_every=1", "optimizer.lr=1e38", "optimizer.warmup_steps=30", "optimizer.clip_norm=off"];
    let said = refused(&mut place.train("run", &set, &[]));
    insta::assert_snapshot!(said, @"
    error: step 2: the gradient norm is NaN, backwards first in the gradient of model.norm.weight; training stopped
    the last checkpoint is runs/run/checkpoints/step-1, of a good model
    to go on and leave such steps out, add --resume --set run.on_not_finite=skip
    to go on otherwise, `oomb export` it, start a new run with model.path set to the export, and lower optimizer.lr, set optimizer.clip_norm, or look at this step's data
    ");
    let last = place.checkpoints("run").newest().unwrap().checkpoint.unwrap();
    assert_eq!(place.metrics("run").len(), last.saved.step);
}

#[test]
fn an_infinite_rate_is_found_in_the_weights() {
    let place = workplace();
    let said = refused(&mut place.train("run", &["optimizer.lr=1e39", "optimizer.warmup_steps=0"], &[]));
    insta::assert_snapshot!(said, @"
    error: step 1: after the update the weights are not finite, first model.embed_tokens.weight; training stopped
    there is no checkpoint yet: lower optimizer.lr, set optimizer.clip_norm, or look at this step's data
    ");
    assert!(place.checkpoints("run").steps().unwrap().is_empty());
}

/// A model in which one token, `Q`, has a direction of its own that the first MLP multiplies until it overflows.
fn spoilt_model(place: &Workplace) {
    succeed(&mut place.train("base", &["run.steps=1", "optimizer.warmup_steps=0"], &[]));
    let (base, spoilt) = (place.run("base").join("model"), place.path().join("spoilt"));
    std::fs::create_dir(&spoilt).unwrap();
    std::fs::copy(base.join("config.json"), spoilt.join("config.json")).unwrap();
    let bytes = std::fs::read(base.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let spoil = |name: &str, row: usize, column: usize, value: f32| match (name, column) {
        ("model.embed_tokens.weight", _) if row == usize::from(b'Q') => f32::from(column == 0),
        ("model.embed_tokens.weight", 0) => 0.0,
        ("model.layers.0.self_attn.o_proj.weight", _) if row == 0 => 0.0,
        ("model.layers.0.mlp.gate_proj.weight" | "model.layers.0.mlp.up_proj.weight", 0) => 1e20,
        _ => value,
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            let columns = view.shape().last().copied().unwrap();
            let values = view.data().as_chunks::<4>().0.iter().enumerate();
            let spoilt =
                values.flat_map(|(i, value)| spoil(name, i / columns, i % columns, f32::from_le_bytes(*value)).to_le_bytes());
            (name.to_owned(), view.shape().to_vec(), spoilt.collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, data)| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap())
    });
    std::fs::write(spoilt.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// So small a rate that the direction stays that of `Q` alone.
const SPOILT: [&str; 3] = ["model.path=spoilt", "optimizer.lr=1e-15", "run.on_not_finite=skip"];

/// `run.toml` with the spoilt model instead of the preset, and `text` of which some windows have a `Q`.
fn spoilt_place(text: &str) -> Workplace {
    let place = workplace();
    spoilt_model(&place);
    let config = std::fs::read_to_string(place.path().join("run.toml")).unwrap();
    std::fs::write(place.path().join("run.toml"), config.replace("preset = \"tiny\"", "")).unwrap();
    std::fs::write(place.path().join("text.txt"), text).unwrap();
    place
}

#[test]
fn a_step_that_overflows_is_named_or_skipped_and_a_resumed_run_skips_the_same() {
    let place = spoilt_place(&(novel()[..1000].replace('Q', "q") + "Quite. What Quince? Quick!"));
    let said = refused(&mut place.train("stopped", &SPOILT[..2], &[]));
    insta::assert_snapshot!(said, @"
    error: step 3: the loss is NaN, first in the output of layer 0 of 2, at token 0 of the sequence; training stopped
    there is no checkpoint yet: lower optimizer.lr, set optimizer.clip_norm, or look at this step's data
    ");

    let reference = place.whole("run", &SPOILT);
    let skipped: Vec<usize> = place.metrics("run").iter().filter(|record| record.skipped).map(|record| record.step).collect();
    assert_eq!(skipped.len(), 3, "once an epoch: {skipped:?}");
    assert!(place.metrics("run").iter().all(|record| record.skipped != (record.loss + record.grad_norm).is_finite()));
    place.rewind("run", 20);
    let (said, _) = succeed(&mut place.train("run", &SPOILT, &["--resume"]));
    assert!(said.contains(&format!("step {} is skipped: the ", skipped[2])), "{said}");
    assert_eq!(place.result("run"), reference);
    let saved = place.checkpoints("run").newest().unwrap().checkpoint.unwrap().saved;
    assert_eq!((saved.step, saved.updates, saved.skipped_in_a_row), (30, 27, 0));
}

#[test]
fn skipping_for_ever_is_refused() {
    let place = spoilt_place(&"Quite queer. ".repeat(80));
    let said = refused(&mut place.train("run", &SPOILT, &[]));
    let last = said.split("error: ").last().unwrap().to_owned();
    insta::assert_snapshot!(last, @"
    step 11: the loss is NaN, first in the output of layer 0 of 2, at token 0 of the sequence; the 10 steps before it were skipped; training stopped
    the last checkpoint is runs/run/checkpoints/step-10, of a good model
    to go on otherwise, `oomb export` it, start a new run with model.path set to the export, and lower optimizer.lr, set optimizer.clip_norm, or look at this step's data
    ");
    assert_eq!(place.metrics("run").len(), 10);
}

/// A spike is told and changes nothing.
#[test]
fn a_loss_that_stands_out_is_told() {
    let place = workplace();
    let digits: String = (0..100_u32).map(|i| char::from(b'0' + (i * i % 11 % 10) as u8)).collect();
    std::fs::write(place.path().join("text.txt"), "abcd ".repeat(180) + &digits).unwrap();
    let (said, _) = succeed(&mut place.train("run", &["run.steps=40", "optimizer.lr=1e-2"], &[]));
    assert!(said.contains(" is a spike; the median before it was "), "{said}");
}
