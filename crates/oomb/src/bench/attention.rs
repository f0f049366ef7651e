//! Attention over pages, forward and backward, dense or through a window, in FLOP of visible pairs only. It must not know
//! how a kernel divides the work.

use super::{Bench, Ceilings, Row, Work};
use crate::kv::select::Selection;
use crate::random::Random;
use oomb_device::device::{new_tensor, tensor_from};
use oomb_device::ops::attention::{AttentionBackward, Mask, PageRef, Pages, Part};
use oomb_device::{Backend, DType, HostData, Result, Tensor};

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// H.
    pub num_heads: usize,
    /// G, a divisor of H.
    pub num_kv_heads: usize,
    /// Dh.
    pub head_dim: usize,
}

/// What all cases share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Heads.
    pub heads: Heads,
    /// P.
    pub page_tokens: usize,
    /// Pages of one call; all of them where nothing is said. More calls carry the softmax from one to the next.
    pub group_pages: Option<usize>,
    /// Storage of dk, dv.
    pub grad_dtype: DType,
    /// Of values and of the places of pages.
    pub seed: u64,
}

/// The last `queries` of `keys` tokens attend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// T.
    pub queries: usize,
    /// Tokens up to the last query, at least `queries`.
    pub keys: usize,
    /// What a query sees.
    pub selection: Selection,
}

impl Case {
    /// First visible position of each query.
    fn first(&self) -> Vec<u32> {
        let mut first = vec![0; self.keys];
        self.selection.narrow(0, &mut first);
        first.split_off(self.keys - self.queries)
    }

    /// Pairs of a query and a key that it sees.
    fn visible_pairs(&self) -> f64 {
        let positions = self.keys - self.queries..self.keys;
        positions.zip(self.first()).map(|(position, first)| (position + 1 - first as usize) as f64).sum()
    }

    fn words(&self) -> String {
        let window = match self.selection {
            Selection::All => String::new(),
            Selection::Window(tokens) => format!(", window {tokens}"),
        };
        if self.queries == self.keys {
            format!("{} causal{window}", self.keys)
        } else {
            format!("{} x {}{window}", self.queries, self.keys)
        }
    }
}

/// FLOP of one visible pair of one head: q·k and p·v forward; q·k again, do·v, and the products for dv, dk, dq backward.
const FORWARD_FLOP: f64 = 4.0;
const BACKWARD_FLOP: f64 = 10.0;

/// Forward, and backward with its row sums, of every case. Per visible pair `4·Dh·H` FLOP forward and `10·Dh·H` backward.
///
/// # Errors
/// Of the device, memory included.
///
/// # Panics
/// If a case has more queries than keys, or heads do not divide.
pub fn run<B: Backend>(bench: &Bench<B>, setup: &Setup, cases: &[Case]) -> Result<Vec<Row>> {
    let rows: Vec<[Row; 2]> = cases.iter().map(|case| measure(bench, setup, case)).collect::<Result<_>>()?;
    Ok(rows.into_iter().flatten().collect())
}

fn measure<B: Backend>(bench: &Bench<B>, setup: &Setup, case: &Case) -> Result<[Row; 2]> {
    assert!(case.queries <= case.keys, "{case:?}: more queries than keys");
    assert!(setup.heads.num_heads.is_multiple_of(setup.heads.num_kv_heads), "{setup:?}");
    let mut problem = Problem::new(bench, setup, case)?;
    let forward = bench.time(|| problem.forward(&bench.device))?;
    let backward = bench.time(|| problem.backward(&bench.device))?;
    let pairs = case.visible_pairs() * (setup.heads.num_heads * setup.heads.head_dim) as f64;
    let ceiling = Ceilings::of(&bench.device.hardware()).map(|ceilings| ceilings.product);
    let row = |direction, timing, flop| Row {
        name: "attention",
        size: case.words(),
        direction,
        timing,
        work: Work::Flops(flop * pairs),
        ceiling,
    };
    Ok([row("forward", forward, FORWARD_FLOP), row("backward", backward, BACKWARD_FLOP)])
}

struct Problem<B: Backend> {
    slab: Tensor<B>,
    grads: Tensor<B>,
    refs: Vec<PageRef>,
    group: usize,
    first: Tensor<B>,
    start: u32,
    scale: f32,
    seed: u64,
    q: Tensor<B>,
    o: Tensor<B>,
    d_o: Tensor<B>,
    lse: Tensor<B>,
    carry: Tensor<B>,
    dq: Tensor<B>,
    delta: Tensor<B>,
}

impl<B: Backend> Problem<B> {
    fn new(bench: &Bench<B>, setup: &Setup, case: &Case) -> Result<Self> {
        let Heads { num_heads, num_kv_heads, head_dim } = setup.heads;
        let (device, t, page) = (&bench.device, case.queries, setup.page_tokens);
        let num_pages = case.keys.div_ceil(page);
        let slab_shape = [num_pages, 2, num_kv_heads, page, head_dim];
        let rows = [t, num_heads, head_dim];
        let first = case.first();
        let start = case.keys - t;
        let slots = shuffled(num_pages, setup.seed);
        let refs: Vec<_> =
            (first[0] as usize / page..num_pages).map(|index| PageRef { slot: slots[index], index: index as u32 }).collect();
        let mut grads = new_tensor(device, setup.grad_dtype, &slab_shape)?;
        device.fill(&mut grads, 0.0);
        Ok(Self {
            slab: bench.activation(&slab_shape, setup.seed)?,
            grads,
            group: setup.group_pages.unwrap_or(refs.len()).max(1),
            refs,
            first: tensor_from(device, DType::U32, &[t], HostData::U32(&first))?,
            start: u32::try_from(start).expect("positions fit 32 bits"),
            scale: 1.0 / (head_dim as f32).sqrt(),
            seed: setup.seed,
            q: bench.activation(&rows, setup.seed + 1)?,
            o: bench.activation(&rows, setup.seed + 2)?,
            d_o: bench.activation(&rows, setup.seed + 3)?,
            lse: new_tensor(device, DType::F32, &rows[..2])?,
            carry: new_tensor(device, DType::F32, &rows)?,
            dq: bench.normal(DType::F32, &rows, 1.0, setup.seed + 4)?,
            delta: new_tensor(device, DType::F32, &rows[..2])?,
        })
    }

    fn forward(&mut self, device: &B) {
        let groups: Vec<_> = self.refs.chunks(self.group).collect();
        let mask = Mask { first: &self.first, start: self.start, scale: self.scale };
        for (index, refs) in groups.iter().enumerate() {
            let part = match (index == 0, index + 1 == groups.len()) {
                (true, true) => Part::Only,
                (true, false) => Part::First,
                (false, false) => Part::Middle,
                (false, true) => Part::Last,
            };
            let kv = Pages { slab: &self.slab, refs };
            device.attention_forward(&mut self.o, &mut self.lse, &mut self.carry, &self.q, kv, mask, part);
        }
    }

    fn backward(&mut self, device: &B) {
        device.attention_delta(&mut self.delta, &self.o, &self.d_o);
        let mask = Mask { first: &self.first, start: self.start, scale: self.scale };
        for refs in self.refs.chunks(self.group) {
            let kv = Pages { slab: &self.slab, refs };
            let (q, d_o, lse, delta, seed) = (&self.q, &self.d_o, &self.lse, &self.delta, self.seed);
            let args = AttentionBackward { q, kv, d_o, lse, delta, mask, seed };
            device.attention_backward(&mut self.dq, Pages { slab: &self.grads, refs }, args);
        }
    }
}

/// The slots `0..num`, shuffled: pages of a long run lie anywhere.
fn shuffled(num: usize, seed: u64) -> Vec<u32> {
    let mut slots: Vec<u32> = (0..num as u32).collect();
    Random::new(seed).shuffle(&mut slots);
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_visible_pairs_count() {
        let pairs = |queries, keys, selection| Case { queries, keys, selection }.visible_pairs();
        assert_eq!(pairs(4, 4, Selection::All), 10.0);
        assert_eq!(pairs(2, 5, Selection::All), 9.0);
        assert_eq!(pairs(5, 5, Selection::Window(2)), 9.0);
        assert_eq!(pairs(2, 5, Selection::Window(2)), 4.0);
    }

    #[test]
    fn shuffling_loses_no_slot() {
        let mut slots = shuffled(100, 7);
        assert_ne!(slots, shuffled(100, 8));
        slots.sort_unstable();
        assert_eq!(slots, (0..100).collect::<Vec<_>>());
    }
}
