//! Strings in JSON: finds their end and decodes their escapes.
//!
//! A prompt is one string of up to 32 MiB, so its end is searched at memory speed; escapes are decoded only where the text
//! is needed.

use memchr::memchr_iter;

/// The first quote behind an even number of backslashes.
///
/// Two bytes before a quote rule out almost every escaped one, and comparing three shifted copies needs no branch, so
/// the compiler vectorises it: code and JSON inside a prompt are full of escaped quotes.
pub(super) fn closing_quote(rest: &[u8]) -> Option<usize> {
    const BLOCK: usize = 128;
    let ends = |quote: &usize| rest[..*quote].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 0;
    let from = |start: usize, len: usize| {
        memchr_iter(b'"', &rest[start..start + len]).map(|offset| start + offset).find(|quote| ends(quote))
    };
    if let Some(quote) = from(0, rest.len().min(2)) {
        return Some(quote);
    }
    let blocks = rest.get(2..)?.chunks(BLOCK).zip(rest[1..].chunks(BLOCK)).zip(rest.chunks(BLOCK));
    for (index, ((block, before), second)) in blocks.enumerate() {
        let mut possible = false;
        for ((byte, before), second) in block.iter().zip(before).zip(second) {
            possible |= (*byte == b'"') & ((*before != b'\\') | (*second == b'\\'));
        }
        if possible && let Some(quote) = from(2 + index * BLOCK, block.len()) {
            return Some(quote);
        }
    }
    None
}

/// Decodes the escapes of a string that [`Scanner::text`] has accepted.
pub(super) fn unescape(raw: &[u8]) -> String {
    let text = String::from_utf8_lossy(raw);
    let mut out = String::with_capacity(text.len());
    let mut rest = &*text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let (decoded, len) = escape_at(&rest[at..]);
        out.push(decoded);
        rest = &rest[at + len..];
    }
    out.push_str(rest);
    out
}

/// The character that the escape at the start of `text` stands for, and the escape's length.
fn escape_at(text: &str) -> (char, usize) {
    match text.as_bytes().get(1) {
        Some(b'n') => ('\n', 2),
        Some(b't') => ('\t', 2),
        Some(b'r') => ('\r', 2),
        Some(b'b') => ('\u{8}', 2),
        Some(b'f') => ('\u{c}', 2),
        Some(b'u') => match (hex4(text, 2), hex4(text, 8)) {
            (Some(high @ 0xD800..0xDC00), Some(low @ 0xDC00..0xE000)) if text.get(6..8) == Some("\\u") => {
                let scalar = 0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00);
                (char::from_u32(scalar).unwrap_or(char::REPLACEMENT_CHARACTER), 12)
            }
            (Some(scalar), _) => (char::from_u32(scalar).unwrap_or(char::REPLACEMENT_CHARACTER), 6),
            (None, _) => (char::REPLACEMENT_CHARACTER, text.len().min(2)),
        },
        Some(other) if other.is_ascii() => (char::from(*other), 2),
        _ => (char::REPLACEMENT_CHARACTER, 1),
    }
}

fn hex4(text: &str, at: usize) -> Option<u32> {
    let digits = text.get(at..at + 4)?;
    digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, 16).ok())?
}
