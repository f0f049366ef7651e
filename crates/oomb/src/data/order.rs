//! In which order windows are visited: a seeded shuffle per epoch, the same on every machine. It must not know what a
//! window holds.

use serde::{Deserialize, Serialize};

/// Where a run stands in its data: enough to go on from there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// Passes over the data that are done.
    pub epoch: u64,
    /// Windows of this epoch that are done.
    pub done: usize,
}

/// Windows in a shuffled order, epoch after epoch, without end.
///
/// Epoch `e` visits a permutation of all windows: Fisher-Yates from the last place down, place `i` swapped with
/// `floor(r · (i + 1) / 2^64)`, where `r` are the outputs of SplitMix64 (Steele, Lea & Flood 2014) started from
/// `seed + (e + 1) · 0xD1B54A32D192ED03`, wrapping.
#[derive(Debug, Clone)]
pub struct Order {
    seed: u64,
    cursor: Cursor,
    permutation: Vec<usize>,
}

impl Order {
    /// The order of `num_windows` windows, from `cursor` on.
    ///
    /// # Panics
    /// If there is no window, or the cursor is beyond the last.
    pub fn new(num_windows: usize, seed: u64, cursor: Cursor) -> Self {
        assert!(num_windows > 0 && cursor.done <= num_windows, "{cursor:?} of {num_windows} windows");
        Self { seed, cursor, permutation: permutation(num_windows, seed, cursor.epoch) }
    }

    /// The next window.
    pub fn next_window(&mut self) -> usize {
        if self.cursor.done == self.permutation.len() {
            self.cursor = Cursor { epoch: self.cursor.epoch + 1, done: 0 };
            self.permutation = permutation(self.permutation.len(), self.seed, self.cursor.epoch);
        }
        self.cursor.done += 1;
        self.permutation[self.cursor.done - 1]
    }

    /// Where it stands.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Passes over the data, with the fraction of the present one.
    pub fn epochs(&self) -> f64 {
        self.cursor.epoch as f64 + self.cursor.done as f64 / self.permutation.len() as f64
    }
}

fn permutation(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut state = seed.wrapping_add((epoch.wrapping_add(1)).wrapping_mul(0xD1B5_4A32_D192_ED03));
    let mut order: Vec<usize> = (0..len).collect();
    for place in (1..len).rev() {
        let scaled = u128::from(splitmix64(&mut state)) * (place as u128 + 1);
        order.swap(place, (scaled >> 64) as usize);
    }
    order
}

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
