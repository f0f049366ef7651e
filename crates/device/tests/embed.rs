//! Embedding: rows, gradients with repeated ids, precisions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "common/gradient.rs"]
mod gradient;

use common::{Output, Random, Rig, agree, distance};
use gradient::{added, check_gradient, dot};
use oomb_device::device::tensor_from;
use oomb_device::ops::embed::EmbedOps;
use oomb_device::{DType, HostData};

const V: usize = 11;
const SHAPES: [(usize, usize); 3] = [(1, 8), (3, 24), (17, 8)];

fn forward(rig: &Rig, ids: &[u32], d: usize, table: &[f64]) -> Output {
    let mut x = rig.void(rig.act, &[ids.len(), d]);
    let ids = tensor_from(&rig.cpu, DType::U32, &[ids.len()], HostData::U32(ids)).unwrap();
    rig.cpu.embed_forward(&mut x, &rig.activation(&[V, d], table), &ids);
    Output::new(rig, "x", &x)
}

fn backward(rig: &Rig, ids: &[u32], d: usize, dx: &[f64], dtable: &[f64]) -> Output {
    let mut dtable = rig.tensor(DType::F32, &[V, d], dtable);
    let dx = rig.activation(&[ids.len(), d], dx);
    rig.cpu.embed_backward(&mut dtable, &dx, &tensor_from(&rig.cpu, DType::U32, &[ids.len()], HostData::U32(ids)).unwrap());
    Output::new(rig, "dtable", &dtable)
}

fn ids(random: &mut Random, t: usize) -> Vec<u32> {
    random.values(t).iter().map(|x| ((x + 1.0) / 2.0 * V as f64) as u32).collect()
}

#[test]
fn forward_takes_rows() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (t, d) in SHAPES {
        let (ids, table) = (ids(&mut random, t), random.values(V * d));
        let expected: Vec<f64> = ids.iter().flat_map(|&id| table[id as usize * d..][..d].to_vec()).collect();
        assert_eq!(distance(&forward(&rig, &ids, d, &table).values, &expected), 0.0);
    }
}

#[test]
fn gradients_match_finite_differences_and_accumulate() {
    let (mut random, rig) = (Random::fresh(), Rig::reference());
    for (t, d) in SHAPES {
        let (ids, table) = (ids(&mut random, t), random.values(V * d));
        let (dx, dtable) = (random.values(t * d), random.values(V * d));
        let gradient = added(&backward(&rig, &ids, d, &dx, &dtable).values, &dtable);
        check_gradient("dtable", &gradient, &table, |table| dot(&forward(&rig, &ids, d, table).values, &dx));
    }
}

#[test]
fn precisions_agree() {
    let mut random = Random::fresh();
    for (t, d) in [(17, 8), (900, 40)] {
        let ids = ids(&mut random, t);
        let (table, dx, dtable) = (random.values(V * d), random.values(t * d), random.values(V * d));
        agree(|rig| vec![forward(rig, &ids, d, &table)]);
        agree(|rig| vec![backward(rig, &ids, d, &dx, &dtable)]);
    }
}
