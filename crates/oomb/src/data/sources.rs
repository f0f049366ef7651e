//! Training data from one source or several. It must not know in which order sequences are visited, nor configurations.

use super::Sequence;
use super::error::{Error, Result};
use super::order::{Place, Share};
use super::windows::Windows;

/// Sources of sequences, each with its weight.
#[derive(Debug)]
pub struct Sources {
    parts: Vec<(Windows, f64)>,
}

impl Sources {
    /// Brings sources together; weights are relative and above 0.
    ///
    /// # Errors
    /// If two were prepared by different tokenizers.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(parts: Vec<(Windows, f64)>) -> Result<Self> {
        let dataset = |part: &(Windows, f64)| part.0.dataset().index().tokenizer.clone();
        let first = dataset(parts.first().expect("at least one source"));
        for part in &parts {
            if dataset(part) != first {
                let (path, other) = (part.0.dataset().folder().to_path_buf(), dataset(part).to_string());
                return Err(Error::MixedTokenizers { path, other, first: first.to_string() });
            }
        }
        Ok(Self { parts })
    }

    /// The sources, in order.
    pub fn windows(&self) -> impl Iterator<Item = &Windows> {
        self.parts.iter().map(|(windows, _)| windows)
    }

    /// CRC-32 of all data and of the sources' weights: the same data gives the same, wherever it lies.
    pub fn fingerprint(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for (windows, weight) in &self.parts {
            crc.update(&windows.dataset().fingerprint().to_le_bytes());
            crc.update(&weight.to_le_bytes());
        }
        crc.finalize()
    }

    /// What [`super::Order`] needs to know of them.
    pub fn shares(&self) -> Vec<Share> {
        self.parts.iter().map(|(windows, weight)| Share { num_windows: windows.len(), weight: *weight }).collect()
    }

    /// Reads a sequence.
    ///
    /// # Errors
    /// If its shards cannot be read.
    ///
    /// # Panics
    /// If there is no such source or window.
    pub fn get(&self, place: Place) -> Result<Sequence> {
        self.parts[place.source].0.get(place.window)
    }
}
