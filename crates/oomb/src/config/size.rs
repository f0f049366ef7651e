//! Numbers with units as people write them: `64MiB`, `20GiB`, `64K`, `1M`. It must not know which setting they are for.

use std::fmt;

/// Reads a number of bytes: `KiB MiB GiB TiB` count in 1024, `KB MB GB TB` in 1000, `B` or nothing is bytes.
///
/// Returns `None` where the text is neither, or where the number does not fit 64 bits.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    scale(number, factor)
}

/// Reads a number of tokens: `K` counts 1024 and `M` 1024², as the field names context lengths; nothing is tokens.
///
/// Returns `None` where the text is neither, or where the number does not fit 64 bits.
pub fn parse_tokens(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        _ => return None,
    };
    scale(number, factor)
}

/// Bytes as people write them, in the largest binary unit that is not a fraction: `1.50 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(unit) = (1..=4).rev().find(|unit| self.0 >> (10 * unit) > 0) else { return write!(f, "{} B", self.0) };
        let suffix = ["KiB", "MiB", "GiB", "TiB"][unit - 1];
        write!(f, "{:.2} {suffix}", self.0 as f64 / (1u64 << (10 * unit)) as f64)
    }
}

/// Writes a number of tokens or bytes with thousands apart: `1,048,576`.
pub fn format_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn split_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// `number · factor`, exactly: a fraction must come out whole.
fn scale(number: &str, factor: u64) -> Option<u64> {
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    let whole: u64 = whole.parse().ok()?;
    if !number.contains('.') {
        return whole.checked_mul(factor);
    }
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(factor);
    let unit = 10_u128.pow(fraction.len() as u32);
    if !parts.is_multiple_of(unit) {
        return None;
    }
    whole.checked_mul(factor)?.checked_add(u64::try_from(parts / unit).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_both_systems() {
        assert_eq!(parse_bytes("64MiB"), Some(64 << 20));
        assert_eq!(parse_bytes("20 GiB"), Some(20 << 30));
        assert_eq!(parse_bytes("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_bytes("20GB"), Some(20_000_000_000));
        assert_eq!(parse_bytes("4096"), Some(4096));
        for wrong in ["", "GiB", "-1", "1e9", "1.5", "0.3KiB", "12 parsecs", "99999999999TiB", "1.", "é"] {
            assert_eq!(parse_bytes(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn tokens_count_in_1024() {
        assert_eq!(parse_tokens("1M"), Some(1_048_576));
        assert_eq!(parse_tokens("64k"), Some(65_536));
        assert_eq!(parse_tokens("2_048"), Some(2048));
        assert_eq!(parse_tokens("64KiB"), None);
    }

    #[test]
    fn written_sizes_are_short() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(Bytes(139 << 30).to_string(), "139.00 GiB");
        assert_eq!(format_count(1_048_576), "1,048,576");
        assert_eq!(format_count(12), "12");
    }
}
