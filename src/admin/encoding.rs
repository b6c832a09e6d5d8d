//! Percent encoding of names in the paths of the admin API.
//!
//! A name of a pool, backend or experiment may contain a slash. Pure. Bounds: linear in the length
//! of the text.

use std::fmt::Write as _;

/// Percent-encodes all but the unreserved characters.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

/// Decodes a part of a path. `None` if the part is broken, empty or not UTF-8.
pub(super) fn decode(part: &str) -> Option<String> {
    let mut bytes = part.bytes();
    let mut decoded = Vec::with_capacity(part.len());
    while let Some(byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            u8::try_from(digit()? * 16 + digit()?).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(decoded).ok().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_encoding_and_a_broken_one_is_refused() {
        for name in ["a/b", "gpu:0", "ü & {x}", "100%"] {
            assert_eq!(decode(&encode(name)).as_deref(), Some(name));
        }
        for broken in ["", "%2", "a%3", "%zz", "%ff"] {
            assert_eq!(decode(broken), None, "{broken}");
        }
    }
}
