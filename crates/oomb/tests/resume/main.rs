//! Runs that die and go on: what they end with is what an uninterrupted run ends with, to the bit.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
mod damage;
mod export;
mod kills;
mod numbers;
mod refusals;
