//! What free memory keeps of more chunks than the one in work, so that pass 2 need not compute it again: the whole policy.
//!
//! In the order of FLOP saved per byte, latest chunks first, since those attend to most: attention's outputs; the layers' inputs,
//! which spare a forward's last product and all that leads to a layer; all that a chunk keeps for its own backward. The first two go
//! to the device as far as it has room, and then to the host, from where they come back while another chunk is computed. How many
//! chunks keep all is tried out.

use super::{Plan, Tier, chunk_tokens};
use crate::model::activations::{Keep, Kept, Place, Tiers};

/// Left free where the rest of a device is filled with kept activations: libraries load code when it is first used.
const DEVICE_SPARE_BYTES: u64 = 1 << 30;

/// Left free on the host, which other programs need too, as a share of what is available.
const HOST_SPARE: f64 = 0.1;

/// FLOP that are computed more than once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Recomputed {
    /// Of products.
    pub(super) products: f64,
    /// Of attention.
    pub(super) attention: f64,
}

impl Recomputed {
    pub(super) fn flop(self) -> f64 {
        self.products + self.attention
    }
}

impl Plan {
    /// Spends what is left, so that least is computed again.
    pub(super) fn keep_more(&mut self) {
        let others = self.num_chunks() - 1;
        let Some(keep) = self.keep.filter(|_| others > 0) else { return };
        let [device, mut host] = self.left();
        if keep < Keep::Attention {
            // What comes back from the host comes into buffers that each layer has of its own.
            host = 0;
        }
        let bytes_of = |kept| {
            let sum = |plan: &Self| plan.buffers.iter().map(|buffer| buffer.bytes).sum::<u64>();
            sum(&Self { buffers: Self { kept, ..self.clone() }.table(), ..self.clone() }) - sum(self)
        };
        let one = Tiers { device: 1, host: 0 };
        let chunk_bytes = bytes_of(Kept { chunks: 1, ..Kept::default() });
        let attention_bytes = bytes_of(Kept { attention: one, ..Kept::default() });
        let inputs_bytes = bytes_of(Kept { inputs: one, ..Kept::default() });
        let most = |left: u64, bytes: u64, others: usize| left.checked_div(bytes).map_or(0, |n| others.min(n as usize));
        let tiers = |left: &mut [u64; 2], bytes: u64, others: usize| {
            let device = most(left[0], bytes, others);
            let host = most(left[1], bytes, others - device);
            left[0] -= device as u64 * bytes;
            left[1] -= host as u64 * bytes;
            Tiers { device, host }
        };
        let choices = (0..=most(device, chunk_bytes, others)).map(|chunks| {
            let mut left = [device - chunks as u64 * chunk_bytes, host];
            let attention = tiers(&mut left, attention_bytes, others - chunks);
            let inputs = tiers(&mut left, inputs_bytes, attention.total());
            Kept { chunks, attention, inputs }
        });
        let flop = |kept| Self { kept, ..self.clone() }.recomputed().flop();
        let best = choices.map(|kept| (flop(kept), kept)).min_by(|(a, _), (b, _)| a.total_cmp(b));
        if let Some((_, kept)) = best {
            self.kept = kept;
            self.buffers = self.table();
        }
    }

    /// Bytes that may be spent: device, host.
    fn left(&self) -> [u64; 2] {
        let (request, machine) = (&self.request, &self.machine);
        if machine.shared {
            let mut left = machine.host_memory.saturating_sub(self.device_bytes() + self.bytes(Tier::Host));
            return [request.keep_budget, request.keep_host_budget].map(|budget| {
                let granted = budget.unwrap_or(0).min(left);
                left -= granted;
                granted
            });
        }
        let device = machine.device_memory.saturating_sub(self.device_bytes() + DEVICE_SPARE_BYTES);
        let host = ((1.0 - HOST_SPARE) * machine.host_memory as f64) as u64;
        let host = host.saturating_sub(self.bytes(Tier::Host));
        let cap = |budget: Option<u64>, left: u64| budget.map_or(left, |budget| budget.min(left));
        [cap(request.keep_budget, device), cap(request.keep_host_budget, host)]
    }

    /// FLOP that one pass over a sequence computes more than once: in pass 2, what pass 1 did already; in a layer's backward, what its
    /// forward in pass 2 did already. Attention as if every earlier position were seen.
    pub(super) fn recomputed(&self) -> Recomputed {
        let Some(keep) = self.keep else { return Recomputed::default() };
        let (request, model) = (&self.request, &self.request.model);
        let (d, f) = (model.hidden_size, model.intermediate_size);
        let tokens = chunk_tokens(request) as f64;
        let products = |columns: usize| 2.0 * (columns * model.num_layers) as f64 * tokens;
        let (project, expand, contract) =
            (products(d * model.qkv_width()), products(d * (model.q_width() + 2 * f)), products(d * f));
        let within = |keep: Keep| match keep {
            Keep::All => 0.0,
            Keep::Mlp => project,
            Keep::Attention | Keep::Inputs => project + expand,
        };
        let num_chunks = self.num_chunks();
        let mut sum = Recomputed::default();
        for index in 0..num_chunks {
            let place = self.place(index, num_chunks);
            if place.inputs.is_some() {
                sum.products += within(Keep::Attention);
                continue;
            }
            let again = place.set == 0 && index + 1 < num_chunks;
            sum.products += within(keep) + if again { project + expand + contract } else { 0.0 };
            if place.attention.is_none() {
                let visible = (index as f64 + 0.5) * tokens;
                let attention = 4.0 * (model.q_width() * model.num_layers) as f64 * visible * tokens;
                sum.attention += attention * f64::from(u8::from(again) + u8::from(keep == Keep::Inputs));
            }
        }
        sum
    }

    pub(super) fn num_chunks(&self) -> usize {
        self.request.pass_tokens().div_ceil(self.request.chunk_tokens)
    }

    /// Where the activations of chunk `index` of `num_chunks` are: the last chunk's forward precedes its backward anyhow, those
    /// before it are kept as far as planned.
    pub fn place(&self, index: usize, num_chunks: usize) -> Place {
        let from_end = num_chunks - 1 - index;
        if from_end <= self.kept.chunks {
            return Place { set: from_end, ..Place::default() };
        }
        let further = from_end - self.kept.chunks - 1;
        Place { set: 0, attention: self.kept.attention.stored(further), inputs: self.kept.inputs.stored(further) }
    }

    /// What is kept of other chunks, in words that go on from what a chunk keeps.
    pub fn kept_words(&self) -> String {
        let Kept { chunks, attention, inputs } = self.kept;
        let others = self.num_chunks() - 1;
        let tiers = |what: &str, tiers: Tiers| match tiers {
            Tiers { device: 0, host: 0 } => String::new(),
            Tiers { device, host: 0 } => format!(", {what} of {device}"),
            Tiers { device: 0, host } => format!(", {what} of {host} on the host"),
            Tiers { device, host } => format!(", {what} of {} ({host} of them on the host)", device + host),
        };
        if self.kept == Kept::default() {
            return String::new();
        }
        let further = format!("{}{}", tiers("attention", attention), tiers("inputs", inputs));
        match chunks {
            0 => format!("; of {others} earlier chunks: {}", further.trim_start_matches(", ")),
            _ => format!("; {chunks} of {others} earlier chunks kept{further}"),
        }
    }
}
