//! Keys, numbers, names and words that no text holds by chance. It must not know what they are for.

use crate::random::Random;
use std::collections::BTreeSet;

const ADJECTIVES: [&str; 32] = [
    "amber", "brisk", "calm", "daring", "eager", "faint", "gentle", "hollow", "icy", "jolly", "keen", "lively", "mellow",
    "noble", "odd", "plain", "quiet", "rapid", "silent", "tidy", "upper", "vivid", "warm", "young", "bitter", "clever", "dusty",
    "early", "fancy", "grand", "humble", "modern",
];
const NOUNS: [&str; 32] = [
    "anchor", "basket", "candle", "dragon", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle", "ladder",
    "market", "needle", "orchard", "pencil", "quarry", "ribbon", "saddle", "temple", "umbrella", "valley", "window", "yarn",
    "zipper", "bridge", "cellar", "desert", "forest", "harbor", "lantern", "meadow",
];

/// Different keys, "amber-anchor".
pub(super) fn keys(random: &mut Random, count: usize) -> Vec<String> {
    distinct(random, count, |random| format!("{}-{}", pick(random, &ADJECTIVES), pick(random, &NOUNS)))
}

/// Different numbers of seven digits.
pub(super) fn numbers(random: &mut Random, count: usize) -> Vec<String> {
    distinct(random, count, |random| (1_000_000 + random.below(9_000_000)).to_string())
}

/// Different numbers of five digits.
pub(super) fn values(random: &mut Random, count: usize) -> Vec<String> {
    distinct(random, count, |random| (10_000 + random.below(90_000)).to_string())
}

/// Different names of five capitals.
pub(super) fn variables(random: &mut Random, count: usize) -> Vec<String> {
    distinct(random, count, |random| (0..5).map(|_| char::from(b'A' + random.below(26) as u8)).collect())
}

/// A word of six letters that nobody knows and everybody can read: two million of them.
pub(super) fn coined(random: &mut Random) -> String {
    const CONSONANTS: &[u8] = b"bcdfghjklmnprstvwxz";
    const VOWELS: &[u8] = b"aeiou";
    let mut letter = |of: &[u8]| char::from(of[random.below(of.len())]);
    (0..6).map(|place| if place % 2 == 0 { letter(CONSONANTS) } else { letter(VOWELS) }).collect()
}

/// Different coined words.
pub(super) fn coined_words(random: &mut Random, count: usize) -> Vec<String> {
    distinct(random, count, coined)
}

fn pick<'a>(random: &mut Random, words: &[&'a str]) -> &'a str {
    words[random.below(words.len())]
}

/// `make` must know many more than `count`.
fn distinct(random: &mut Random, count: usize, mut make: impl FnMut(&mut Random) -> String) -> Vec<String> {
    let (mut seen, mut words) = (BTreeSet::new(), Vec::with_capacity(count));
    while words.len() < count {
        let word = make(random);
        if seen.insert(word.clone()) {
            words.push(word);
        }
    }
    words
}
