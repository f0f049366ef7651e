//! A chunk of queries over all earlier keys: random values, a dense f64 softmax and its gradient, and the same through the
//! device, with everything that must not be read poisoned.
//!
//! It must not know how the device divides the work.

use crate::common::{Random, Rig};
use crate::gradient::added;
use oomb_device::cpu::Cpu;
use oomb_device::device::tensor_from;
use oomb_device::ops::attention::{AttentionBackward, AttentionOps, Mask, PageRef, Pages, Part};
use oomb_device::{DType, HostData, Tensor};
use std::ops::Range;

/// Sizes, and where the chunk starts.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub t: usize,
    pub start: usize,
    pub page: usize,
    pub kv_heads: usize,
    pub ratio: usize,
    pub head_dim: usize,
    pub sees: Sees,
}

/// What queries see besides causality.
#[derive(Debug, Clone, Copy)]
pub enum Sees {
    All,
    Window(usize),
    /// Documents of that length.
    Documents(usize),
    Itself,
}

impl Sizes {
    pub fn heads(&self) -> usize {
        self.kv_heads * self.ratio
    }

    /// Keys in all.
    pub fn keys(&self) -> usize {
        self.start + self.t
    }

    pub fn pages(&self) -> usize {
        self.keys().div_ceil(self.page)
    }

    /// First visible position of query `t`.
    pub fn first(&self, t: usize) -> usize {
        let position = self.start + t;
        match self.sees {
            Sees::All => 0,
            Sees::Window(length) => (position + 1).saturating_sub(length),
            Sees::Documents(length) => position / length * length,
            Sees::Itself => position,
        }
    }

    /// Whether any query sees the position.
    fn used(&self, position: usize) -> bool {
        position >= self.first(0) && position < self.keys()
    }
}

#[derive(Clone)]
pub struct Problem {
    pub sizes: Sizes,
    pub scale: f32,
    /// `[T, H, Dh]`.
    pub q: Vec<f64>,
    /// `[S, G, Dh]`.
    pub k: Vec<f64>,
    /// `[S, G, Dh]`.
    pub v: Vec<f64>,
    /// `[T, H, Dh]`.
    pub d_o: Vec<f64>,
    /// What dq holds before.
    pub dq_before: Vec<f64>,
    /// What dk, dv hold before, `[S, G, Dh]`.
    pub dkv_before: [Vec<f64>; 2],
    /// Where each page sits; slots that are not named hold NaN.
    pub slots: Vec<u32>,
    /// Where its gradient sits.
    pub gradient_slots: Vec<u32>,
}

#[derive(Clone)]
pub struct Forward {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Problem {
    pub fn new(random: &mut Random, sizes: Sizes) -> Self {
        let (queries, keys) = (sizes.t * sizes.heads() * sizes.head_dim, sizes.keys() * sizes.kv_heads * sizes.head_dim);
        let slots = shuffled(random, sizes.pages());
        let gradient_slots = shuffled(random, sizes.pages());
        Self {
            sizes,
            // Scores of a standard deviation near 1.5, so that weights differ.
            scale: 4.5 / (sizes.head_dim as f32).sqrt(),
            q: random.values(queries),
            k: random.values(keys),
            v: random.values(keys),
            d_o: random.values(queries),
            dq_before: random.values(queries),
            dkv_before: [random.values(keys), random.values(keys)],
            slots,
            gradient_slots,
        }
    }

    /// The dense softmax: the keys that a query sees, `p` of each, and the log-sum-exp.
    fn weights(&self, t: usize, head: usize, without: &Range<usize>) -> (Vec<usize>, Vec<f64>, f64) {
        let Sizes { start, ratio, head_dim, kv_heads, .. } = self.sizes;
        let q = &self.q[(t * self.sizes.heads() + head) * head_dim..][..head_dim];
        let seen: Vec<usize> = (self.sizes.first(t)..=start + t).filter(|key| !without.contains(key)).collect();
        let score = |&key: &usize| {
            let k = &self.k[(key * kv_heads + head / ratio) * head_dim..][..head_dim];
            f64::from(self.scale) * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let lse = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
        (seen, scores.iter().map(|s| (s - lse).exp()).collect(), lse)
    }

    pub fn dense_forward(&self) -> Forward {
        self.dense_forward_without(0..0)
    }

    /// As if those keys were not there.
    pub fn dense_forward_without(&self, without: Range<usize>) -> Forward {
        let Sizes { ratio, head_dim, kv_heads, .. } = self.sizes;
        let mut out = Forward { o: vec![0.0; self.q.len()], lse: Vec::new() };
        for (row, o) in out.o.chunks_exact_mut(head_dim).enumerate() {
            let (t, head) = (row / self.sizes.heads(), row % self.sizes.heads());
            let (seen, p, lse) = self.weights(t, head, &without);
            out.lse.push(lse);
            for (key, p) in seen.into_iter().zip(p) {
                let v = &self.v[(key * kv_heads + head / ratio) * head_dim..][..head_dim];
                o.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
            }
        }
        out
    }

    pub fn dense_backward(&self) -> Gradients {
        let Sizes { ratio, head_dim, kv_heads, .. } = self.sizes;
        let zeros = || vec![0.0; self.k.len()];
        let mut out = Gradients { dq: vec![0.0; self.q.len()], dk: zeros(), dv: zeros() };
        let scale = f64::from(self.scale);
        for row in 0..self.q.len() / head_dim {
            let (t, head) = (row / self.sizes.heads(), row % self.sizes.heads());
            let (seen, p, _) = self.weights(t, head, &(0..0));
            let at = |key: usize| (key * kv_heads + head / ratio) * head_dim..(key * kv_heads + head / ratio + 1) * head_dim;
            let queries = row * head_dim..(row + 1) * head_dim;
            let (q, d_o) = (&self.q[queries.clone()], &self.d_o[queries.clone()]);
            let dp: Vec<f64> =
                seen.iter().map(|&key| self.v[at(key)].iter().zip(d_o).map(|(v, d_o)| v * d_o).sum::<f64>()).collect();
            let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for ((key, p), dp) in seen.into_iter().zip(p).zip(dp) {
                let ds = p * (dp - delta);
                out.dv[at(key)].iter_mut().zip(d_o).for_each(|(dv, d_o)| *dv += p * d_o);
                out.dk[at(key)].iter_mut().zip(q).for_each(|(dk, q)| *dk += scale * ds * q);
                out.dq[queries.clone()].iter_mut().zip(&self.k[at(key)]).for_each(|(dq, k)| *dq += scale * ds * k);
            }
        }
        out
    }

    /// `[slots, 2, G, P, Dh]` with NaN wherever no query looks: in unused slots, after the last query, and in front of the
    /// first visible position.
    fn slab(&self, k: &[f64], v: &[f64], slots: &[u32]) -> Vec<f64> {
        let Sizes { page, kv_heads, head_dim, .. } = self.sizes;
        let mut slab = vec![f64::NAN; self.num_slots() * 2 * kv_heads * page * head_dim];
        for (half, values) in [k, v].into_iter().enumerate() {
            for (row, values) in values.chunks_exact(head_dim).enumerate() {
                let (position, head) = (row / kv_heads, row % kv_heads);
                if self.sizes.used(position) {
                    let place = self.place(slots, half, position, head);
                    slab[place..place + head_dim].copy_from_slice(values);
                }
            }
        }
        slab
    }

    fn num_slots(&self) -> usize {
        self.sizes.pages() + SPARE_SLOTS
    }

    fn place(&self, slots: &[u32], half: usize, position: usize, head: usize) -> usize {
        let Sizes { page, kv_heads, head_dim, .. } = self.sizes;
        (((slots[position / page] as usize * 2 + half) * kv_heads + head) * page + position % page) * head_dim
    }

    /// The pages of a slab back as `[S, G, Dh]`, 0 where no query looks; there, and in unused slots, the slab must still
    /// hold NaN.
    fn unslab(&self, slab: &[f64], half: usize, slots: &[u32]) -> Vec<f64> {
        let Sizes { kv_heads, head_dim, .. } = self.sizes;
        let mut out = vec![0.0; self.k.len()];
        for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let (position, head) = (row / kv_heads, row % kv_heads);
            if self.sizes.used(position) {
                out.copy_from_slice(&slab[self.place(slots, half, position, head)..][..head_dim]);
            }
        }
        let used = (0..self.sizes.keys()).filter(|&position| self.sizes.used(position)).count();
        let touched = slab.iter().filter(|x| !x.is_nan()).count();
        assert_eq!(touched, 2 * used * kv_heads * head_dim, "wrote where no query looks, or left NaN where one does");
        out
    }

    fn slab_shape(&self) -> [usize; 5] {
        let Sizes { page, kv_heads, head_dim, .. } = self.sizes;
        [self.num_slots(), 2, kv_heads, page, head_dim]
    }

    fn refs(slots: &[u32]) -> Vec<PageRef> {
        slots.iter().zip(0..).map(|(&slot, index)| PageRef { slot, index }).collect()
    }

    /// The device's answer, with the pages given in groups of these sizes.
    pub fn forward(&self, rig: &Rig, groups: &[usize]) -> Forward {
        assert_eq!(groups.iter().sum::<usize>(), self.sizes.pages());
        self.attend(rig, &Self::refs(&self.slots), groups)
    }

    /// Over these pages alone, all in one group.
    pub fn forward_pages(&self, rig: &Rig, pages: &[usize]) -> Forward {
        let refs = Self::refs(&self.slots);
        let refs: Vec<PageRef> = pages.iter().map(|&page| refs[page]).collect();
        self.attend(rig, &refs, &[refs.len()])
    }

    fn attend(&self, rig: &Rig, mut rest: &[PageRef], groups: &[usize]) -> Forward {
        let Sizes { t, head_dim, .. } = self.sizes;
        let shape = [t, self.sizes.heads(), head_dim];
        let slab = rig.activation(&self.slab_shape(), &self.slab(&self.k, &self.v, &self.slots));
        let q = rig.activation(&shape, &self.q);
        let first = self.first_tensor(rig);
        let mask = Mask { first: &first, start: self.sizes.start as u32, scale: self.scale };
        let (mut o, mut lse) = (rig.void(rig.act, &shape), rig.void(DType::F32, &shape[..2]));
        let mut carry = rig.void(DType::F32, &shape);
        let mut seen_end = 0;
        for (index, &size) in groups.iter().enumerate() {
            let part = match (index, index + 1 == groups.len()) {
                (0, true) => Part::Only,
                (0, false) => Part::First,
                (_, false) => Part::Middle,
                (_, true) => Part::Last,
            };
            let (group, after) = rest.split_at(size);
            rest = after;
            let kv = Pages { slab: &slab, refs: group };
            rig.cpu.attention_forward(&mut o, &mut lse, &mut carry, &q, kv, mask, part);
            if matches!(part, Part::First | Part::Middle) {
                assert!(rig.get(&o).iter().all(|o| o.is_nan()), "o is written before the last group");
                seen_end = group.last().map_or(seen_end, |page| (page.index as usize + 1) * self.sizes.page);
                self.check_carry(&rig.get(&lse), &rig.get(&carry), seen_end);
            }
        }
        Forward { o: rig.get(&o), lse: rig.get(&lse) }
    }

    /// What one group leaves for the next, after all keys in front of `end`.
    fn check_carry(&self, lse: &[f64], carry: &[f64], end: usize) {
        for (row, (lse, carry)) in lse.iter().zip(carry.chunks_exact(self.sizes.head_dim)).enumerate() {
            if self.sizes.first(row / self.sizes.heads()) < end {
                assert!(lse.is_finite() && carry.iter().all(|x| x.is_finite()));
            } else {
                assert!(*lse == f64::NEG_INFINITY && carry.iter().all(|&x| x == 0.0), "row {row} saw nothing yet: {lse}");
            }
        }
    }

    /// What the device adds, by groups; `forward` as its inputs.
    pub fn backward(&self, rig: &Rig, groups: &[usize], forward: &Forward) -> Gradients {
        let after = self.backward_onto(rig, groups, forward, (DType::F32, 0));
        let before = |x: &[f64]| -> Vec<f64> {
            let width = self.sizes.kv_heads * self.sizes.head_dim;
            x.iter().enumerate().map(|(i, &x)| if self.sizes.used(i / width) { x } else { 0.0 }).collect()
        };
        Gradients {
            dq: added(&after.dq, &self.dq_before),
            dk: added(&after.dk, &before(&self.dkv_before[0])),
            dv: added(&after.dv, &before(&self.dkv_before[1])),
        }
    }

    /// What the device leaves, starting from `dq_before` and `dkv_before`, with page gradients of that dtype and seed.
    pub fn backward_onto(&self, rig: &Rig, groups: &[usize], forward: &Forward, (dtype, seed): (DType, u64)) -> Gradients {
        let Sizes { t, head_dim, .. } = self.sizes;
        let shape = [t, self.sizes.heads(), head_dim];
        let slab = rig.activation(&self.slab_shape(), &self.slab(&self.k, &self.v, &self.slots));
        let before = self.slab(&self.dkv_before[0], &self.dkv_before[1], &self.gradient_slots);
        let dkv = rig.tensor(dtype, &self.slab_shape(), &before);
        let (q, d_o) = (rig.activation(&shape, &self.q), rig.activation(&shape, &self.d_o));
        let (o, lse) = (rig.activation(&shape, &forward.o), rig.tensor(DType::F32, &shape[..2], &forward.lse));
        let mut delta = rig.void(DType::F32, &shape[..2]);
        rig.cpu.attention_delta(&mut delta, &o, &d_o);
        let mut dq = rig.tensor(DType::F32, &shape, &self.dq_before);
        let first = self.first_tensor(rig);
        let mask = Mask { first: &first, start: self.sizes.start as u32, scale: self.scale };
        let (refs, gradient_refs) = (Self::refs(&self.slots), Self::refs(&self.gradient_slots));
        let mut from = 0;
        for &size in groups {
            let pages = from..from + size;
            from += size;
            let args = AttentionBackward {
                q: &q,
                kv: Pages { slab: &slab, refs: &refs[pages.clone()] },
                d_o: &d_o,
                lse: &lse,
                delta: &delta,
                mask,
                seed,
            };
            rig.cpu.attention_backward(&mut dq, Pages { slab: &dkv, refs: &gradient_refs[pages] }, args);
        }
        let after = rig.get(&dkv);
        let half = |half| self.unslab(&after, half, &self.gradient_slots);
        Gradients { dq: rig.get(&dq), dk: half(0), dv: half(1) }
    }

    fn first_tensor(&self, rig: &Rig) -> Tensor<Cpu> {
        let first: Vec<u32> = (0..self.sizes.t).map(|t| self.sizes.first(t) as u32).collect();
        tensor_from(&rig.cpu, DType::U32, &[first.len()], HostData::U32(&first)).unwrap()
    }
}

const SPARE_SLOTS: usize = 3;

/// Distinct slots for that many pages, among a few more, in random order.
pub fn shuffled(random: &mut Random, num_pages: usize) -> Vec<u32> {
    let mut slots: Vec<u32> = (0..(num_pages + SPARE_SLOTS) as u32).collect();
    let keys = random.values(slots.len());
    slots.sort_by(|&a, &b| keys[a as usize].total_cmp(&keys[b as usize]));
    slots.truncate(num_pages);
    slots
}
