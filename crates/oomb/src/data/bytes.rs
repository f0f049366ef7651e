//! The tokenizer whose tokens are bytes, as a `tokenizer.json`: a folder that holds it says how its text is read. It must not
//! know where files lie.

/// Everything before and after the vocabulary: byte-level BPE that merges nothing.
const BEFORE: &str = concat!(
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"#,
    r#""pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false},"#,
    r#""post_processor":null,"#,
    r#""decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false},"#,
    r#""model":{"type":"BPE","vocab":{"#,
);
const AFTER: &str = r#"},"merges":[]}}"#;

/// The file, the same in every version, so that it is known by its bytes.
pub(super) fn tokenizer_json() -> String {
    let entries = letters().map(|(byte, letter)| format!("{:?}:{byte}", letter.to_string()));
    format!("{BEFORE}{}{AFTER}", entries.collect::<Vec<_>>().join(","))
}

/// The letter that stands for each byte in a byte-level vocabulary, as GPT-2's `bytes_to_unicode` has them: the printable ones of
/// Latin-1 stand for themselves, the others for the letters from U+0100 on.
fn letters() -> impl Iterator<Item = (u8, char)> {
    let mut others = '\u{100}'..;
    (0..=u8::MAX).map(move |byte| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE.. => (byte, char::from(byte)),
        _ => (byte, others.next().expect("there are more letters than bytes")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library that reads it elsewhere finds the same tokens, and the text again.
    #[test]
    fn tokens_are_bytes_to_hugging_face_too() {
        let tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer_json()).unwrap();
        let every: String = (0..=0x10_FFFF).step_by(97).filter_map(char::from_u32).collect();
        for text in ["", " ", "Emma  Woodhouse,\r\n\thandsome", "\0\u{7f}\u{ad}\u{a0}", "naïve 日本 🦀", &every] {
            let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
            assert_eq!(ids, bytes, "{text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
        assert_eq!(tokenizer.get_vocab_size(true), 256);
    }
}
