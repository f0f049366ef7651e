//! In which order windows are visited: sources in turn by weight, a seeded shuffle of each per epoch, the same on every
//! machine. It must not know what a window holds.

use crate::random::Random;
use serde::{Deserialize, Serialize};

/// Where a run stands in its data: enough to go on from there.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// Where it stands in each source; empty before the first window.
    pub sources: Vec<SourceCursor>,
}

/// Where a run stands in one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SourceCursor {
    /// Passes over the source that are done.
    pub epoch: u64,
    /// Windows of this epoch that are done.
    pub done: usize,
}

/// What there is of a source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Its windows, at least one.
    pub num_windows: usize,
    /// Its part of the sequences, relative to the other sources; above 0.
    pub weight: f64,
}

/// A window of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the source.
    pub source: usize,
    /// Index of the window in it.
    pub window: usize,
}

impl Cursor {
    /// Whether a run over `shares` can stand there: no if the data was replaced by shorter data, or has other sources.
    pub fn fits(&self, shares: &[Share]) -> bool {
        let within = |(cursor, share): (&SourceCursor, &Share)| cursor.done <= share.num_windows;
        self.sources.is_empty() || self.sources.len() == shares.len() && self.sources.iter().zip(shares).all(within)
    }
}

/// Windows in a shuffled order, epoch after epoch, without end.
///
/// The next source is the one that is furthest behind its share of the windows so far, the first of equals: after any number
/// of windows each source has its share as nearly as whole windows allow, and nothing but the cursor needs to be known to go
/// on. Epoch `e` of source `s` visits a permutation of all its windows: Fisher-Yates from the last place down, place `i`
/// swapped with `floor(r · (i + 1) / 2^64)`, where `r` are the outputs of SplitMix64 (Steele, Lea & Flood 2014) started from
/// `seed + (e + 1) · 0xD1B54A32D192ED03 + s · 0x8CB92BA72F3D8DD7`, wrapping.
#[derive(Debug, Clone)]
pub struct Order {
    seed: u64,
    shares: Vec<Share>,
    cursor: Cursor,
    permutations: Vec<Vec<usize>>,
}

impl Order {
    /// The order of the windows of `shares`, from `cursor` on.
    ///
    /// # Panics
    /// If there is no source, or one without a window, or the cursor does not fit ([`Cursor::fits`]).
    pub fn new(shares: &[Share], seed: u64, cursor: Cursor) -> Self {
        assert!(!shares.is_empty() && shares.iter().all(|share| share.num_windows > 0), "nothing to visit in {shares:?}");
        assert!(cursor.fits(shares), "{cursor:?} of {shares:?}");
        let mut cursor = cursor;
        cursor.sources.resize(shares.len(), SourceCursor::default());
        let permute = |(source, share): (usize, &Share)| {
            permutation(share.num_windows, seed_of(seed, source), cursor.sources[source].epoch)
        };
        let permutations = shares.iter().enumerate().map(permute).collect();
        Self { seed, shares: shares.to_vec(), cursor, permutations }
    }

    /// The next window.
    pub fn next_window(&mut self) -> Place {
        let source = self.next_source();
        let (cursor, permutation) = (&mut self.cursor.sources[source], &mut self.permutations[source]);
        if cursor.done == permutation.len() {
            *cursor = SourceCursor { epoch: cursor.epoch + 1, done: 0 };
            *permutation = self::permutation(permutation.len(), seed_of(self.seed, source), cursor.epoch);
        }
        cursor.done += 1;
        Place { source, window: permutation[cursor.done - 1] }
    }

    /// Where it stands.
    pub fn cursor(&self) -> Cursor {
        self.cursor.clone()
    }

    /// Passes over the data, with the fraction of the present one: windows visited by windows there are.
    pub fn epochs(&self) -> f64 {
        self.visited().sum::<f64>() / self.shares.iter().map(|share| share.num_windows as f64).sum::<f64>()
    }

    /// Windows visited of each source.
    fn visited(&self) -> impl Iterator<Item = f64> {
        let sources = self.cursor.sources.iter().zip(&self.shares);
        sources.map(|(cursor, share)| cursor.epoch as f64 * share.num_windows as f64 + cursor.done as f64)
    }

    fn next_source(&self) -> usize {
        let all = self.visited().sum::<f64>() + 1.0;
        let weights: f64 = self.shares.iter().map(|share| share.weight).sum();
        let behind = self.visited().zip(&self.shares).map(|(visited, share)| all * share.weight / weights - visited);
        let furthest = behind.enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
        furthest.map_or(0, |(source, _)| source)
    }
}

fn seed_of(seed: u64, source: usize) -> u64 {
    seed.wrapping_add((source as u64).wrapping_mul(0x8CB9_2BA7_2F3D_8DD7))
}

fn permutation(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    Random::new(seed.wrapping_add((epoch.wrapping_add(1)).wrapping_mul(0xD1B5_4A32_D192_ED03))).shuffle(&mut order);
    order
}
