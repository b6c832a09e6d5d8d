//! Strings in JSON: finds their end and decodes their escapes.
//!
//! A prompt is one string of up to 32 MiB, so the end is searched at memory speed. Escapes are
//! decoded only where the text is needed.

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch, u8x64};

use crate::openai::block::{BLOCK, Blocks, Escapes};

/// The end of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClosingQuote {
    pub(super) at: usize,
    /// Whether escapes precede it.
    pub(super) behind_escapes: bool,
}

/// The first quote that is not escaped. The first byte of `rest` must not be escaped by a byte
/// before it.
pub(super) fn closing_quote(rest: &[u8]) -> Option<ClosingQuote> {
    dispatch!(Level::new(), simd => first_quote(simd, rest))
}

#[inline(always)]
fn first_quote<S: Simd>(simd: S, rest: &[u8]) -> Option<ClosingQuote> {
    let (mut blocks, mut escapes) = (Blocks::of(rest), Escapes::default());
    let (mut start, mut has_escapes) = (0, false);
    while let Some(block) = blocks.next() {
        let bytes = u8x64::from_slice(simd, block);
        let backslashes = bytes.simd_eq(b'\\').to_bitmask();
        let quotes = bytes.simd_eq(b'"').to_bitmask() & !escapes.escaped(backslashes);
        if quotes != 0 {
            let at = quotes.trailing_zeros();
            let behind_escapes = has_escapes || backslashes & ((1 << at) - 1) != 0;
            return Some(ClosingQuote { at: start + at as usize, behind_escapes });
        }
        has_escapes |= backslashes != 0;
        start += BLOCK;
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

/// The character of the escape at the start of `text`, and the length of the escape.
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
