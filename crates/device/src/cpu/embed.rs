//! [`EmbedOps`] on the CPU.
//!
//! It must not know what a token is.

use super::args::Kind::{Activation, Exactly};
use super::buffer::ViewMut;
use super::parallel::{add, for_rows};
use super::real::Float;
use super::{Cpu, with_real};
use crate::ops::embed::EmbedOps;
use crate::{DType, Tensor};
use rayon::prelude::*;

impl EmbedOps for Cpu {
    fn embed_forward(&self, x: &mut Tensor<Self>, table: &Tensor<Self>, ids: &Tensor<Self>) {
        let op = self.op("embed_forward");
        op.require(table.shape().len() == 2, || format!("table is {table:?}, wanted [V, D]"));
        let (v, d, t) = (table.dim(0), table.dim(1), ids.len());
        with_real!(self, R, {
            let mut x = op.write::<R>("x", x, Activation, &[t, d]);
            let table = op.read::<R>("table", table, Activation, &[v, d]);
            let ids = op.read::<u32>("ids", ids, Exactly(DType::U32), &[t]);
            op.enqueue(move || {
                check_ids(ids.slice(), v);
                forward(x.slice(), table.slice(), ids.slice(), d);
            });
        });
    }

    fn embed_backward(&self, dtable: &mut Tensor<Self>, dx: &Tensor<Self>, ids: &Tensor<Self>) {
        let op = self.op("embed_backward");
        op.require(dtable.shape().len() == 2, || format!("dtable is {dtable:?}, wanted [V, D]"));
        let (v, d, t) = (dtable.dim(0), dtable.dim(1), ids.len());
        with_real!(self, R, {
            let mut dtable = op.write::<R>("dtable", dtable, Exactly(DType::F32), &[v, d]);
            let dx = op.read::<R>("dx", dx, Activation, &[t, d]);
            let ids = op.read::<u32>("ids", ids, Exactly(DType::U32), &[t]);
            op.enqueue(move || {
                check_ids(ids.slice(), v);
                backward(&mut dtable, dx.slice(), ids.slice(), d);
            });
        });
    }
}

fn check_ids(ids: &[u32], vocabulary: usize) {
    if let Some(t) = ids.iter().position(|&id| id as usize >= vocabulary) {
        panic!("token {t} has id {}, outside the vocabulary of {vocabulary}", ids[t]);
    }
}

fn forward<R: Float>(x: &mut [R], table: &[R], ids: &[u32], d: usize) {
    for_rows(x, d, |first, x| {
        for (x, &id) in x.chunks_exact_mut(d).zip(&ids[first..]) {
            x.copy_from_slice(&table[id as usize * d..][..d]);
        }
    });
}

/// Tokens grouped by id: each row of the table is added to by one task, in order of t.
fn backward<R: Float>(dtable: &mut ViewMut<R>, dx: &[R], ids: &[u32], d: usize) {
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&t| (ids[t], t));
    let groups: Vec<&[usize]> = order.chunk_by(|&a, &b| ids[a] == ids[b]).collect();
    let rows: Vec<_> = groups.iter().map(|group| ids[group[0]] as usize * d).map(|start| start..start + d).collect();
    dtable.disjoint(&rows).into_par_iter().zip(groups).for_each(|(row, group)| {
        for &t in group {
            add(row, &dx[t * d..][..d]);
        }
    });
}
