//! The arithmetic that every CPU op is generic over, bf16 rounding, and the random generator of the contract.
//!
//! It must not know tensors.

use super::buffer::Element;
use crate::DType;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// f32 or f64.
pub(super) trait Float:
    Element
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn from_f64(x: f64) -> Self;
    fn from_f32(x: f32) -> Self;
    fn to_f64(self) -> f64;
    /// e^self, in straight-line code that vectorises for f32.
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    /// The larger; the other where one is NaN.
    fn max(self, other: Self) -> Self;
    /// The nearest bf16, ties to even.
    fn to_bf16(self) -> Self;
    /// One of the two bf16 beside it, as the uniform `random` falls: the mean over `random` is the number itself.
    fn to_bf16_stochastic(self, random: u64) -> Self;
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as f32
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        exp_f32(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f32::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        f32::max(self, other)
    }

    #[inline(always)]
    fn to_bf16(self) -> Self {
        let bits = self.to_bits();
        // Adding just under half of the last kept bit, or half where that bit is odd, carries exactly when rounding up.
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000;
        if self.is_nan() { self } else { f32::from_bits(rounded) }
    }

    #[inline(always)]
    fn to_bf16_stochastic(self, random: u64) -> Self {
        // A carry out of the dropped bits is as likely as they are large.
        let rounded = self.to_bits().wrapping_add((random >> 48) as u32) & 0xFFFF_0000;
        if self.is_finite() { f32::from_bits(rounded) } else { self }
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f64::from(x)
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        f64::max(self, other)
    }

    fn to_bf16(self) -> Self {
        if !self.is_finite() {
            return self;
        }
        if self.abs() < BF16_NORMAL {
            return (self / BF16_SUBNORMAL).round_ties_even() * BF16_SUBNORMAL;
        }
        let bits = self.to_bits();
        let half = (1u64 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1);
        let rounded = f64::from_bits((bits + half) & !((1u64 << DROPPED) - 1));
        if rounded.abs() >= BF16_OVERFLOW { f64::INFINITY.copysign(self) } else { rounded }
    }

    fn to_bf16_stochastic(self, random: u64) -> Self {
        if !self.is_finite() {
            return self;
        }
        if self.abs() < BF16_NORMAL {
            let unit = (random >> 11) as f64 / (1u64 << 53) as f64;
            return (self.abs() / BF16_SUBNORMAL + unit).floor().copysign(self) * BF16_SUBNORMAL;
        }
        let rounded = f64::from_bits((self.to_bits() + (random >> (64 - DROPPED))) & !((1u64 << DROPPED) - 1));
        if rounded.abs() >= BF16_OVERFLOW { f64::INFINITY.copysign(self) } else { rounded }
    }
}

/// Smallest normal bf16.
const BF16_NORMAL: f64 = 1.0 / (1u128 << 126) as f64;
/// Smallest subnormal bf16.
const BF16_SUBNORMAL: f64 = BF16_NORMAL / 128.0;
/// Where the exponent of a bf16 ends.
const BF16_OVERFLOW: f64 = 2.0 * (1u128 << 127) as f64;
/// Of the 52 mantissa bits of an f64, 7 stay in a bf16.
const DROPPED: u32 = 45;

/// e^x to 1.2e-7 relative, from adds, multiplies and selects only: `x = n ln 2 + r` with |r| <= ln 2 / 2, and the Taylor
/// series of e^r to the seventh power (the remainder is below 6e-9). Results below 2e-38 are 0, so that no product is
/// subnormal, which would cost a hundred cycles.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has 9 significant bits, so that its product with n is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -86.98;
    const HIGHEST: f32 = 89.0;

    let clamped = x.clamp(LOWEST, HIGHEST);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * r + coefficient;
    }
    // 2^(n-1), then 2: n reaches 128, whose power of two is not a finite float.
    let power = f32::from_bits(((shifted.to_bits() << 23) as i32).wrapping_add(126 << 23) as u32);
    let result = series * power * 2.0;
    if x < LOWEST { 0.0 } else { result }
}

/// What storing a value does to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
    /// Nothing.
    None,
    /// Nearest bf16, ties to even.
    Bf16,
}

impl Rounding {
    pub(super) fn of(dtype: DType) -> Self {
        if dtype == DType::Bf16 { Self::Bf16 } else { Self::None }
    }

    /// Rounds a run of values in place.
    #[inline(always)]
    pub(super) fn apply<R: Float>(self, values: &mut [R]) {
        if self == Self::Bf16 {
            values.iter_mut().for_each(|x| *x = x.to_bf16());
        }
    }
}

/// Weyl increment of SplitMix64.
pub(super) const SPLITMIX_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Finaliser of SplitMix64 (Steele, Lea, Flood 2014).
#[inline(always)]
pub(super) fn splitmix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_the_whole_range() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -86.9 + 175.6 * (i as f32 / 2e6);
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp_f32(x)) - exact).abs() / exact);
        }
        // Half an ulp (6e-8) of the last product, as much again of the series' last sum.
        assert!(worst < 1.3e-7, "{worst}");
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-88.0), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp_f32(88.7).is_finite());
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounding_agrees_with_half() {
        for i in 0..=u32::MAX / 4099 {
            let x = f32::from_bits(i * 4099);
            let expected = half::bf16::from_f32(x);
            assert!(x.to_bf16() == expected.to_f32() || x.is_nan() && x.to_bf16().is_nan(), "{x:e}");
            assert!(f64::from(x).to_bf16() == expected.to_f64() || x.is_nan(), "{x:e}");
        }
        // Just above a tie: rounding through f32 first would go to even.
        assert_eq!((1.0 + 1.0 / 256.0 + 1e-12f64).to_bf16(), 1.0 + 1.0 / 128.0);
        assert_eq!((1.0 + 1.0 / 256.0f64).to_bf16(), 1.0);
    }
}
