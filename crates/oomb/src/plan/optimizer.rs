//! The optimizer's state: what may be chosen, in which order it is tried, and the buffers that each choice takes. It must not
//! know a device, nor how the state is used.

use super::{Machine, Plan, Tier};
use oomb_device::DType;
use oomb_device::ops::moments::BLOCK_ELEMENTS;

/// Slots of device memory that a state on the host passes through: one comes in, one is computed with, one goes out.
pub const STAGING_SLOTS: usize = 3;

/// Bytes of a piece: long enough for the full rate of the link, so short that three of them are nothing.
const PIECE_BYTES: u64 = 64 << 20;

/// Slots start at multiples of this many bytes.
const SLOT_ALIGNMENT: u64 = 256;

/// What a run wants of its optimizer's state; `None` leaves the choice to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRequest {
    /// Storage of both moments: f32, bf16, or U8 (8 bits).
    pub dtype: Option<DType>,
    /// Whether bf16 weights have f32 masters; without, they are rounded stochastically.
    pub master_weights: Option<bool>,
    /// Where it lives.
    pub tier: Option<Tier>,
    /// Largest piece of a state that lives on the host.
    pub piece_bytes: u64,
}

impl Default for StateRequest {
    /// All is left to the plan.
    fn default() -> Self {
        Self { dtype: None, master_weights: None, tier: None, piece_bytes: PIECE_BYTES }
    }
}

/// An optimizer's state, decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Storage of both moments: f32, bf16, or U8 (8 bits).
    pub dtype: DType,
    /// Whether there are f32 masters; never where the weights are f32 themselves.
    pub masters: bool,
    /// Where it lives.
    pub tier: Tier,
    /// Elements of a piece, a multiple of [`BLOCK_ELEMENTS`]; all, where it lives on the device.
    pub piece_elements: usize,
}

/// One array of the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// f32 weights.
    Master,
    /// First moments.
    M,
    /// Second moments.
    V,
    /// Scales of first moments in 8 bits.
    MScales,
    /// Scales of second moments in 8 bits.
    VScales,
}

impl Part {
    /// Elements of the slab for each of this array's.
    pub fn stride(self) -> usize {
        match self {
            Self::Master | Self::M | Self::V => 1,
            Self::MScales | Self::VScales => BLOCK_ELEMENTS,
        }
    }

    /// Name of its buffer, where it lives on the device.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "adamw.master",
            Self::M => "adamw.m",
            Self::V => "adamw.v",
            Self::MScales => "adamw.m_scales",
            Self::VScales => "adamw.v_scales",
        }
    }
}

/// Name of the buffer of a state that lives on the host.
pub const HOST: &str = "adamw.host";
/// Name of the slots that it passes through.
pub const STAGING: &str = "adamw.staging";

impl StateRequest {
    /// What is tried, the first that fits is taken: exactness first, then speed. With masters f32, bf16, 8 bits; then without
    /// masters bf16 and 8 bits; each on the device, then on the host, which gives the same numbers and takes time.
    pub(super) fn candidates(&self, machine: &Machine, trained: usize) -> Vec<State> {
        let f32_weights = machine.compute_dtype == DType::F32;
        let order = [(DType::F32, true), (DType::Bf16, true), (DType::U8, true), (DType::Bf16, false), (DType::U8, false)];
        let dtypes: Vec<_> = match (self.dtype, self.master_weights) {
            (Some(dtype), Some(masters)) => vec![(dtype, masters)],
            (Some(dtype), None) => vec![(dtype, true), (dtype, false)],
            (None, Some(true)) => order[..3].to_vec(),
            (None, Some(false)) => [DType::F32, DType::Bf16, DType::U8].map(|dtype| (dtype, false)).to_vec(),
            (None, None) => order.to_vec(),
        };
        let tiers = match self.tier {
            Some(tier) => vec![tier],
            // The same memory twice gains nothing.
            None if machine.shared => vec![Tier::Device],
            None => vec![Tier::Device, Tier::Host],
        };
        let mut candidates = Vec::new();
        for (dtype, masters) in dtypes {
            for &tier in &tiers {
                let mut state = State { dtype, masters: masters && !f32_weights, tier, piece_elements: trained };
                if tier == Tier::Host {
                    let blocks = (self.piece_bytes / state.block_bytes(machine)).max(1) as usize;
                    state.piece_elements = (blocks * BLOCK_ELEMENTS).min(trained);
                }
                if !candidates.contains(&state) {
                    candidates.push(state);
                }
            }
        }
        candidates
    }
}

impl State {
    /// Its arrays in the order in which they lie in memory, and their element types.
    pub fn parts(&self) -> Vec<(Part, DType)> {
        let mut parts = Vec::new();
        if self.masters {
            parts.push((Part::Master, DType::F32));
        }
        parts.extend([(Part::M, self.dtype), (Part::V, self.dtype)]);
        if self.dtype == DType::U8 {
            parts.extend([(Part::MScales, DType::F32), (Part::VScales, DType::F32)]);
        }
        parts
    }

    /// Bytes of [`BLOCK_ELEMENTS`] elements of the slab.
    fn block_bytes(&self, machine: &Machine) -> u64 {
        self.parts().iter().map(|(part, dtype)| (BLOCK_ELEMENTS / part.stride()) as u64 * machine.bytes_of(*dtype)).sum()
    }

    /// Name, tier, dtype and shape of each buffer, for `trained` elements.
    pub(super) fn buffers(&self, machine: &Machine, trained: usize) -> Vec<(&'static str, Tier, DType, Vec<usize>)> {
        if self.tier == Tier::Device {
            let whole = |(part, dtype): (Part, DType)| (part.name(), Tier::Device, dtype, vec![trained / part.stride()]);
            return self.parts().into_iter().map(whole).collect();
        }
        let bytes = |elements: usize| (elements / BLOCK_ELEMENTS) as u64 * self.block_bytes(machine);
        let slot = bytes(self.piece_elements).next_multiple_of(SLOT_ALIGNMENT) as usize;
        vec![
            (HOST, Tier::Host, DType::U8, vec![bytes(trained) as usize]),
            (STAGING, Tier::Device, DType::U8, vec![STAGING_SLOTS, slot]),
        ]
    }

    /// `"int8"`: as the configuration names the moments.
    pub fn dtype_name(&self) -> &'static str {
        dtype_name(self.dtype)
    }
}

/// `"int8"`: as the configuration names moments of this type.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bf16",
        DType::U8 => "int8",
        _ => "f32",
    }
}

impl Plan {
    /// Bytes that one update moves: through the link, both ways, where the state lives on the host; else through device memory,
    /// the state read and written, gradients read, weights written and, without masters, read. 0 without an optimizer.
    pub fn update_bytes(&self) -> u64 {
        let (Some(state), trained) = (self.optimizer, self.request.trained_elements() as u64) else { return 0 };
        let both_ways = 2 * trained / BLOCK_ELEMENTS as u64 * state.block_bytes(&self.machine);
        let weights = self.machine.bytes_of(self.machine.compute_dtype) * if state.masters { 1 } else { 2 };
        match state.tier {
            Tier::Device => both_ways + trained * (self.machine.bytes_of(DType::F32) + weights),
            Tier::Host => both_ways,
        }
    }

    /// `"int8 states, no masters, on the device"`; `None` without an optimizer.
    pub fn optimizer_words(&self) -> Option<String> {
        let state = self.optimizer?;
        let masters = match (self.machine.compute_dtype, state.masters) {
            (DType::F32, _) => "",
            (_, true) => ", f32 masters",
            (_, false) => ", no masters",
        };
        let place = if state.tier == Tier::Device { "on the device" } else { "streamed from the host" };
        let first = self.request.optimizer_state.candidates(&self.machine, self.request.trained_elements())[0];
        let why = if first == state { "" } else { " (more does not fit)" };
        Some(format!("{} states{masters}, {place}{why}", state.dtype_name()))
    }
}
