//! As much text as there is room for, counted by the tokenizer itself. It must not know what the text is.

use crate::data::{Result, Tokenizer};

/// Steps by interpolation before the search only halves: text is nearly linear, so that a few are enough.
const INTERPOLATIONS: usize = 12;

/// The text of `render(n)` and its tokens for the largest n whose tokens are at most `room`; where not even n = 0 fits, its
/// number of tokens.
pub(super) fn fit(
    tokenizer: &Tokenizer,
    room: usize,
    render: &dyn Fn(usize) -> String,
) -> Result<std::result::Result<(String, Vec<u32>), usize>> {
    let base = tokenizer.encode(&render(0))?;
    if base.len() > room {
        return Ok(Err(base.len()));
    }
    let (mut low, mut best) = (0, (render(0), base));
    // The smallest n known not to fit, and its tokens.
    let mut high: Option<(usize, usize)> = None;
    let mut slope = 1.0;
    for step in 0.. {
        let spare = (room - best.1.len()) as f64;
        let guess = match high {
            Some((high, _)) if high == low + 1 => break,
            Some((high, _)) if step > INTERPOLATIONS => low + (high - low) / 2,
            Some((high, tokens)) => {
                let slope = (tokens - best.1.len()) as f64 / (high - low) as f64;
                (low + (spare / slope) as usize).clamp(low + 1, high - 1)
            }
            // At least one more, at most eight times what there is, so that a poor first guess costs little.
            None => (low + ((spare / slope) as usize).clamp(1, 64.max(8 * low))).max(low + 1),
        };
        let text = render(guess);
        let ids = tokenizer.encode(&text)?;
        if ids.len() <= room {
            slope = (ids.len().saturating_sub(best.1.len()) as f64 / (guess - low) as f64).max(0.1);
            (low, best) = (guess, (text, ids));
        } else {
            high = Some((guess, ids.len()));
        }
    }
    Ok(Ok(best))
}
