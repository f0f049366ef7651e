//! From tokens to text as they come: whole characters only, and nothing of a stop string. It must not know where tokens
//! come from.

use crate::data::{Result, Tokenizer};

/// Tokens before the new ones that are decoded along, so that a tokenizer that drops the space of a first token does not
/// drop it here.
const CONTEXT_TOKENS: usize = 8;

/// Decodes tokens one by one.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens in sight; the first `told` are told already.
    ids: Vec<u32>,
    told: usize,
    stops: &'a [String],
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// Text that can be shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// What is certain by now.
    pub text: String,
    /// A stop string has come; neither it nor anything after it is in `text`.
    pub stopped: bool,
}

impl<'a> TextStream<'a> {
    /// A stream after `prompt`, ending before the first of `stops`; an empty stop string stops nothing.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32], stops: &'a [String]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        Self { tokenizer, told: ids.len(), ids, stops, held: String::new() }
    }

    /// Takes a token and returns what it makes certain: nothing, where it ends within a character.
    ///
    /// # Errors
    /// If the tokenizer refuses.
    pub fn push(&mut self, id: u32) -> Result<Piece> {
        self.ids.push(id);
        let whole = self.tokenizer.decode(&self.ids)?;
        if whole.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() < self.told + CONTEXT_TOKENS {
            return Ok(Piece::default());
        }
        self.tell(&whole)
    }

    /// The rest, when no more tokens come.
    ///
    /// # Errors
    /// If the tokenizer refuses.
    pub fn finish(mut self) -> Result<String> {
        let whole = self.tokenizer.decode(&self.ids)?;
        let piece = self.tell(&whole)?;
        Ok(if piece.stopped { piece.text } else { piece.text + &self.held })
    }

    fn tell(&mut self, whole: &str) -> Result<Piece> {
        let before = self.tokenizer.decode(&self.ids[..self.told])?;
        let new = whole.strip_prefix(before.as_str()).unwrap_or_default();
        self.held.push_str(new);
        self.ids.drain(..self.ids.len().saturating_sub(CONTEXT_TOKENS));
        self.told = self.ids.len();
        let stops = || self.stops.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stops().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return Ok(Piece { text: std::mem::take(&mut self.held), stopped: true });
        }
        let open = |at: &usize| stops().any(|stop| stop.starts_with(&self.held[*at..]));
        let keep = self.held.char_indices().map(|(at, _)| at).find(open).unwrap_or(self.held.len());
        let held = self.held.split_off(keep);
        Ok(Piece { text: std::mem::replace(&mut self.held, held), stopped: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TokenizerSource;

    fn stream(text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = Tokenizer::load(&TokenizerSource::Bytes).unwrap();
        let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut stream = TextStream::new(&tokenizer, &tokenizer.encode("a prompt longer than the context").unwrap(), &stops);
        let mut pieces = Vec::new();
        for id in tokenizer.encode(text).unwrap() {
            let piece = stream.push(id).unwrap();
            pieces.push(piece.text);
            if piece.stopped {
                return (pieces, true);
            }
        }
        pieces.push(stream.finish().unwrap());
        (pieces, false)
    }

    #[test]
    fn characters_come_whole() {
        let text = "naïve – 東京 🦀 done, and a long enough tail to move the context along";
        let (pieces, _) = stream(text, &[]);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
        assert_eq!(pieces[2..4], ["".to_owned(), "ï".to_owned()]);
        // Bytes that are no text are told as such, and hold up nothing.
        let tokenizer = Tokenizer::load(&TokenizerSource::Bytes).unwrap();
        let mut stream = TextStream::new(&tokenizer, &[], &[]);
        let told: String = [0xFF; 20].into_iter().chain([65]).map(|id| stream.push(id).unwrap().text).collect();
        assert!(told.ends_with('A') && told.len() > 3, "{told:?}");
    }

    #[test]
    fn nothing_of_a_stop_string_is_told() {
        assert_eq!(
            stream("abc\n\nUser: hi", &["\n\nUser:"]),
            (["a", "b", "c", "", "", "", "", "", "", ""].map(String::from).to_vec(), true)
        );
        let (pieces, stopped) = stream("one\n\ntwo", &["\n\nUser:", ""]);
        assert_eq!((pieces.concat().as_str(), stopped), ("one\n\ntwo", false));
        let (pieces, stopped) = stream("ends with \n\nUs", &["\n\nUser:"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("ends with \n\nUs", false));
        let (pieces, stopped) = stream("aab", &["ab", "b"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("a", true));
    }
}
