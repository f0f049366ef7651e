//! Moments of an optimizer in 8 bits: [`BLOCK_ELEMENTS`] consecutive elements share a scale, each is a small float of it.
//!
//! A code has E bits of exponent and three of mantissa, as the FP8 formats of the Open Compute Project have, but without codes
//! for infinity or NaN: `e = code >> 3`, `f = code & 7`, and the value is `scale · f` where `e = 0`, else
//! `scale · (8 + f) · 2^(e-1)`. The first moment has a sign and E = 4 (`scale · 2^18` is above its largest), the second, which
//! is never negative, E = 5 (`scale · 2^34`): linear codes would round most second moments of a block to 0, and divide by that.
//!
//! Scales are powers of two, so that a new scale shifts exponents and changes only the smallest values. Rounding is stochastic, so
//! that the mean of what is stored is what was computed: rounded to nearest, a second moment with `beta2 = 0.999` would never move.
//! A second moment that is not 0 is stored as at least one `scale`: it is a divisor.
//!
//! The CPU computes with these functions; the CUDA kernels mirror them.

/// Elements that share a scale.
pub const BLOCK_ELEMENTS: usize = 256;

/// Random bits of one rounding.
pub const RANDOM_BITS: u32 = 20;

/// One of the two kinds of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SmallFloat {
    /// Of first moments: sign, four bits of exponent.
    Signed,
    /// Of second moments: five bits of exponent.
    Unsigned,
}

/// Smallest exponent of a scale: smaller ones are not normal f32 numbers.
const LOWEST: i32 = -126;
/// Exponent bias of f32.
const BIAS: i32 = 127;

impl SmallFloat {
    /// E of the module's documentation.
    pub fn exponent_bits(self) -> u32 {
        match self {
            Self::Signed => 4,
            Self::Unsigned => 5,
        }
    }

    /// The scale of a block whose largest magnitude is `largest`: the smallest power of two under which nothing overflows,
    /// however it is rounded; at least 2^-126.
    pub fn scale(self, largest: f32) -> f32 {
        // One unit of the last place that is kept: what may be rounded up to the next power of two counts as that.
        let exponent = ((largest.to_bits() + (1 << RANDOM_BITS)) >> 23) as i32 - BIAS;
        let exponent = (exponent - (1 << self.exponent_bits()) - 1).max(LOWEST);
        f32::from_bits(((exponent + BIAS) as u32) << 23)
    }

    /// The value of a code; exact.
    #[inline(always)]
    pub fn decode(self, code: u8, scale: f32) -> f32 {
        let magnitude = match self {
            Self::Signed => code & 0x7F,
            Self::Unsigned => code,
        };
        let (exponent, fraction) = (u32::from(magnitude >> 3), magnitude & 7);
        let integer = f32::from(fraction + if exponent > 0 { 8 } else { 0 });
        let value = integer * f32::from_bits(scale.to_bits() + (exponent.saturating_sub(1) << 23));
        if code == magnitude { value } else { -value }
    }

    /// One of the two codes beside `x`, as the uniform `random` of [`RANDOM_BITS`] bits falls: the mean over `random` is `x`,
    /// but for second moments below `scale`. A value that has a code gets that code.
    #[inline(always)]
    pub fn encode(self, x: f32, scale: f32, random: u32) -> u8 {
        let size = x.abs() * (1.0 / scale);
        // Below 8 codes are integers: with 8 added the last bit that is kept is worth 1, as it is from 8 to 16.
        let (shifted, first) = if size < 8.0 { (size + 8.0, 130 << 3) } else { (size, 129 << 3) };
        let code = ((shifted.to_bits() + random) >> RANDOM_BITS) - first;
        match self {
            Self::Signed => code.min(0x7F) as u8 | if x < 0.0 { 0x80 } else { 0 },
            Self::Unsigned => code.clamp(u32::from(x > 0.0), 0xFF) as u8,
        }
    }
}
