//! Attention at one size: all pages in one call and page by page, then the gradient with f32 and with bf16 pages. It must not
//! know how a backend divides the work.

use super::Kind;
use super::cases::PAGE;
use super::rig::{Output, Outputs, Random, Rig};
use half::bf16;
use oomb_device::cpu::{Cpu, CpuOptions, Real};
use oomb_device::ops::attention::{AttentionBackward, Mask, PageRef, Pages, Part};
use oomb_device::{Backend, DType, Result, Tensor};

/// What queries see besides causality.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sees {
    /// Every earlier position.
    All,
    /// So many positions, its own included.
    Window(usize),
    /// Documents of that length.
    Documents(usize),
}

/// The chunk, and what it looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSizes {
    /// T.
    pub queries: usize,
    /// Position of the first query.
    pub start: usize,
    /// G.
    pub kv_heads: usize,
    /// H / G.
    pub ratio: usize,
    /// Dh.
    pub head_dim: usize,
    /// The mask.
    pub sees: Sees,
}

impl AttentionSizes {
    pub(super) fn words(&self) -> String {
        let Self { queries, start, kv_heads, ratio, head_dim, .. } = self;
        let sees = match self.sees {
            Sees::All => String::new(),
            Sees::Window(length) => format!(", window {length}"),
            Sees::Documents(length) => format!(", documents of {length}"),
        };
        format!("{queries} x {}, heads {} on {kv_heads} x {head_dim}{sees}", start + queries, ratio * kv_heads)
    }

    fn q_shape(&self) -> [usize; 3] {
        [self.queries, self.kv_heads * self.ratio, self.head_dim]
    }

    fn first(&self) -> Vec<u32> {
        let first = |position: usize| match self.sees {
            Sees::All => 0,
            Sees::Window(length) => (position + 1).saturating_sub(length),
            Sees::Documents(length) => position / length * length,
        };
        (self.start..self.start + self.queries).map(|position| first(position) as u32).collect()
    }
}

/// Slots beyond those in use.
const SPARE_SLOTS: usize = 2;

/// Inputs, the same for every device.
struct Problem {
    sizes: AttentionSizes,
    first: Vec<u32>,
    refs: Vec<PageRef>,
    grad_refs: Vec<PageRef>,
    slab_shape: [usize; 5],
    q: Vec<f64>,
    d_o: Vec<f64>,
    slab: Vec<f64>,
    dq_before: Vec<f64>,
    grads_before: Vec<f64>,
}

impl Problem {
    fn new(sizes: AttentionSizes) -> Self {
        let mut random = Random::new(8 + sizes.head_dim as u64 + sizes.ratio as u64);
        let (end, first) = (sizes.start + sizes.queries, sizes.first());
        let pages = end.div_ceil(PAGE);
        let slots = pages + SPARE_SLOTS;
        let refs = |slots: Vec<u32>| -> Vec<_> {
            let all = slots.into_iter().zip(0..).map(|(slot, index)| PageRef { slot, index });
            all.skip(first[0] as usize / PAGE).collect()
        };
        let (kv_refs, grad_refs) = (refs(random.slots(pages, slots)), refs(random.slots(pages, slots)));
        let slab_shape = [slots, 2, sizes.kv_heads, PAGE, sizes.head_dim];
        let elements = slab_shape.iter().product();
        let queries = sizes.q_shape().iter().product();
        let mut slab = random.scaled(elements, 2.0);
        // What lies beyond the last query must not be used, whatever it is.
        let last = kv_refs.last().map_or(0, |page| page.slot as usize);
        let tail = if end.is_multiple_of(PAGE) { PAGE } else { end % PAGE };
        for tile in 2 * sizes.kv_heads * last..2 * sizes.kv_heads * (last + 1) {
            slab[(tile * PAGE + tail) * sizes.head_dim..(tile + 1) * PAGE * sizes.head_dim].fill(f64::NAN);
        }
        Self {
            sizes,
            first,
            refs: kv_refs,
            grad_refs,
            slab_shape,
            q: random.scaled(queries, 2.0),
            d_o: random.values(queries),
            slab,
            dq_before: random.scaled(queries, 1.0 / 16.0),
            grads_before: random.scaled(elements, 1.0 / 16.0),
        }
    }

    fn mask<'a, B: Backend>(&self, first: &'a Tensor<B>) -> Mask<'a, B> {
        Mask { first, start: self.sizes.start as u32, scale: 1.0 / (self.sizes.head_dim as f32).sqrt() }
    }

    /// o and lse, with `group` pages in each call.
    fn forward<B: Backend>(&self, rig: &Rig<'_, B>, group: usize) -> Result<[Tensor<B>; 2]> {
        let shape = self.sizes.q_shape();
        let (slab, q, first) =
            (rig.activation(&self.slab_shape, &self.slab)?, rig.activation(&shape, &self.q)?, rig.ids(&self.first)?);
        let (mut o, mut lse) = (rig.void(rig.act, &shape)?, rig.void(DType::F32, &shape[..2])?);
        let mut carry = rig.void(DType::F32, &shape)?;
        let groups: Vec<_> = self.refs.chunks(group).collect();
        for (index, refs) in groups.iter().enumerate() {
            let part = match (index == 0, index + 1 == groups.len()) {
                (true, true) => Part::Only,
                (true, false) => Part::First,
                (false, false) => Part::Middle,
                (false, true) => Part::Last,
            };
            rig.device.attention_forward(&mut o, &mut lse, &mut carry, &q, Pages { slab: &slab, refs }, self.mask(&first), part);
        }
        Ok([o, lse])
    }

    /// delta, dq and the pages' gradients, with `group` pages in each call, from the exact o and lse.
    fn backward<B: Backend>(
        &self,
        rig: &Rig<'_, B>,
        (exact_o, exact_lse): (&[f64], &[f64]),
        grads: Tensor<B>,
        group: usize,
    ) -> Result<[Tensor<B>; 3]> {
        let shape = self.sizes.q_shape();
        let (slab, q, first) =
            (rig.activation(&self.slab_shape, &self.slab)?, rig.activation(&shape, &self.q)?, rig.ids(&self.first)?);
        let (o, d_o) = (rig.activation(&shape, exact_o)?, rig.activation(&shape, &self.d_o)?);
        let lse = rig.f32(&shape[..2], exact_lse)?;
        let (mut delta, mut dq) = (rig.void(DType::F32, &shape[..2])?, rig.f32(&shape, &self.dq_before)?);
        rig.device.attention_delta(&mut delta, &o, &d_o);
        for (refs, grad_refs) in self.refs.chunks(group).zip(self.grad_refs.chunks(group)) {
            let kv = Pages { slab: &slab, refs };
            let args = AttentionBackward { q: &q, kv, d_o: &d_o, lse: &lse, delta: &delta, mask: self.mask(&first), seed: 9 };
            rig.device.attention_backward(&mut dq, Pages { slab: &grads, refs: grad_refs }, args);
        }
        Ok([delta, dq, grads])
    }
}

pub(super) fn run<B: Backend>(rig: &Rig<'_, B>, sizes: AttentionSizes) -> Result<Vec<Output>> {
    let problem = Problem::new(sizes);
    // The backward of every device starts from the same o and lse.
    let cpu = Cpu::new(CpuOptions { real: Real::F64, ..CpuOptions::default() });
    let exact = Rig::new(&cpu);
    let [o, lse] = problem.forward(&exact, usize::MAX)?;
    let o: Vec<f64> = exact.get(&o)?.into_iter().map(|o| bf16::from_f64(o).to_f64()).collect();
    let lse = exact.get(&lse)?;

    let mut out = Outputs::new(rig);
    for (op, group) in [("attention_forward", usize::MAX), ("attention_forward, carried", 1)] {
        let [o, lse] = problem.forward(rig, group)?;
        out.of(op).add("o", &o)?.add("lse", &lse)?;
    }
    for (op, group) in [("attention_backward", usize::MAX), ("attention_backward, grouped", 1)] {
        let before = rig.f32(&problem.slab_shape, &problem.grads_before)?;
        let [delta, dq, grads] = problem.backward(rig, (&o, &lse), before, group)?;
        if group > 1 {
            out.of("attention_delta").add("delta", &delta)?;
        }
        out.of(op).added("dq", Kind::RoundedInside, &dq, &problem.dq_before)?;
        out.added("dk, dv", Kind::RoundedInside, &grads, &problem.grads_before)?;
    }
    let zeros = rig.tensor(rig.bf16_pages, &problem.slab_shape, &vec![0.0; problem.grads_before.len()])?;
    let [_, _, grads] = problem.backward(rig, (&o, &lse), zeros, usize::MAX)?;
    let values = rig.get(&grads)?;
    out.of("attention_backward, bf16 pages").values("dk, dv", Kind::Stochastic, values);
    Ok(out.list)
}
