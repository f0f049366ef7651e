//! Text to hide something in: a user's, or sentences that say nothing. It must not know what is hidden.

use super::Error;
use crate::random::Random;

/// RULER's noise.
const NOISE: &str = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";

/// A text as words; it repeats without end.
#[derive(Debug, Clone)]
pub struct Haystack {
    /// Each with the space after it.
    words: Vec<String>,
    /// Whether a word ends a sentence.
    ends: Vec<bool>,
}

impl Haystack {
    /// Sentences that say nothing.
    pub fn noise() -> Self {
        Self::of(NOISE)
    }

    /// The words of a text.
    ///
    /// # Errors
    /// If it has none.
    pub fn text(text: &str) -> Result<Self, Error> {
        let haystack = Self::of(text);
        if haystack.words.is_empty() { Err(Error::EmptyHaystack) } else { Ok(haystack) }
    }

    fn of(text: &str) -> Self {
        let mut words: Vec<String> = Vec::new();
        // Runs of spaces belong to the word before.
        for part in text.trim_start().split_inclusive(char::is_whitespace) {
            match words.last_mut() {
                Some(last) if part.trim().is_empty() => last.push_str(part),
                _ => words.push(part.to_owned()),
            }
        }
        if let Some(last) = words.last_mut().filter(|last| !last.ends_with(char::is_whitespace)) {
            last.push(' ');
        }
        let closing = |c: char| matches!(c, '"' | '\'' | ')' | '”' | '’');
        let ends = words.iter().map(|word| word.trim_end().trim_end_matches(closing).ends_with(['.', '!', '?'])).collect();
        Self { words, ends }
    }

    /// The beginning of a sentence: that of the whole text, or one after an end.
    pub(super) fn start(&self, random: &mut Random) -> usize {
        let from = random.below(self.words.len());
        (0..self.words.len()).map(|ahead| from + ahead).find(|&word| word == 0 || self.ends_at(word - 1)).unwrap_or(0)
    }

    /// `num_words` words from `start` on, with each of `inserts` (percent of the text, sentence) at the end of a sentence
    /// nearest before its depth.
    pub(super) fn with(&self, start: usize, num_words: usize, inserts: &[(f64, String)]) -> String {
        let place = |depth: f64| {
            let at = (depth / 100.0 * num_words as f64).round() as usize;
            if at == num_words { at } else { (1..=at).rev().find(|&word| self.ends_at(start + word - 1)).unwrap_or(0) }
        };
        let mut places: Vec<(usize, &str)> = inserts.iter().map(|(depth, text)| (place(*depth), text.as_str())).collect();
        places.sort_by_key(|(at, _)| *at);
        let mut places = places.into_iter().peekable();
        let mut text = String::new();
        for word in 0..=num_words {
            while let Some((_, insert)) = places.next_if(|(at, _)| *at == word) {
                if !text.is_empty() && !text.ends_with(char::is_whitespace) {
                    text.push(' ');
                }
                text.push_str(insert);
                text.push(' ');
            }
            if word < num_words {
                text.push_str(&self.words[(start + word) % self.words.len()]);
            }
        }
        text.truncate(text.trim_end().len());
        text
    }

    fn ends_at(&self, word: usize) -> bool {
        self.ends[word % self.ends.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inserts_stand_between_sentences() {
        let haystack = Haystack::text("One two.  Three\n\nfour five. \"Six!\" Seven").unwrap();
        let at = |depth| haystack.with(0, 7, &[(depth, "HERE.".to_owned())]);
        assert_eq!(at(0.0), "HERE. One two.  Three\n\nfour five. \"Six!\" Seven");
        assert_eq!(at(50.0), "One two.  HERE. Three\n\nfour five. \"Six!\" Seven");
        assert_eq!(at(90.0), "One two.  Three\n\nfour five. \"Six!\" HERE. Seven");
        assert_eq!(at(100.0), "One two.  Three\n\nfour five. \"Six!\" Seven HERE.");
        assert_eq!(haystack.with(5, 4, &[]), "\"Six!\" Seven One two.");
        assert!(matches!(Haystack::text(" \n "), Err(Error::EmptyHaystack)));
        let mut random = Random::new(3);
        let starts: Vec<usize> = (0..50).map(|_| haystack.start(&mut random)).collect();
        assert!(starts.iter().all(|start| [0, 2, 5, 6].contains(&(start % 7))), "{starts:?}");
    }
}
