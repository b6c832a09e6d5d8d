//! Counts the characters of a text by kind, in blocks (see [`super::super::block`]).
//!
//! UTF-8 continuation bytes do not count. An escape counts once, by its backslash. The digits of
//! `\uXXXX` are first counted as characters, and subtracted where the escape ends, because it may
//! begin in the previous block.

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch, u8x64};

use crate::openai::block::{BLOCK, Blocks, Escapes, behind, tail};

/// Characters of a text by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextShape {
    /// ASCII letters and blanks.
    pub plain: u64,
    /// Other ASCII: digits, punctuation, control characters.
    pub marks: u64,
    /// Characters outside ASCII.
    pub wide: u64,
    /// Blanks, raw line breaks and tabs that directly follow another of these.
    pub blanks: u64,
}

impl TextShape {
    /// Counts the undecoded content of a JSON string (or any raw JSON).
    pub fn of(raw: &[u8]) -> Self {
        dispatch!(Level::new(), simd => count(simd, raw, true))
    }

    /// Counts plain text, in which a backslash is an ordinary character.
    pub fn of_plain(text: &[u8]) -> Self {
        dispatch!(Level::new(), simd => count(simd, text, false))
    }

    /// Adds the counts of another text.
    pub fn add(&mut self, other: Self) {
        self.plain = self.plain.saturating_add(other.plain);
        self.marks = self.marks.saturating_add(other.marks);
        self.wide = self.wide.saturating_add(other.wide);
        self.blanks = self.blanks.saturating_add(other.blanks);
    }

    /// The counts added since `before`, an earlier state of the same counts.
    pub fn since(self, before: Self) -> Self {
        Self {
            plain: self.plain - before.plain,
            marks: self.marks - before.marks,
            wide: self.wide - before.wide,
            blanks: self.blanks - before.blanks,
        }
    }

    /// The counts of a text that is read this many times.
    pub fn times(self, count: u64) -> Self {
        Self {
            plain: self.plain.saturating_mul(count),
            marks: self.marks.saturating_mul(count),
            wide: self.wide.saturating_mul(count),
            blanks: self.blanks.saturating_mul(count),
        }
    }

    /// All characters.
    pub fn characters(&self) -> u64 {
        self.plain.saturating_add(self.marks).saturating_add(self.wide).saturating_add(self.blanks)
    }
}

#[inline(always)]
fn number(set: u64) -> u64 {
    u64::from(set.count_ones())
}

#[inline(always)]
fn count<S: Simd>(simd: S, raw: &[u8], is_json: bool) -> TextShape {
    let (mut blocks, mut escapes, mut units) = (Blocks::of(raw), Escapes::default(), CodeUnits::default());
    let (mut characters, mut plain, mut wide, mut blanks) = (0, 0, 0, 0);
    let (mut blank_before, mut pending) = (0, 0);
    while let Some(block) = blocks.next() {
        let bytes = u8x64::from_slice(simd, block);
        let letter = ((bytes | u8x64::splat(simd, 0x20)) - u8x64::splat(simd, b'a')).simd_lt(26);
        let blank = bytes.simd_le(b' ').to_bitmask();
        let padding = blank & behind(blank, blank_before, 1);
        blank_before = tail(blank);
        let not_ascii = bytes.simd_ge(0x80).to_bitmask();
        let mut left_out = padding;
        if is_json {
            let escaped = escapes.escaped(bytes.simd_eq(b'\\').to_bitmask());
            left_out |= escaped & !not_ascii;
            let u = escaped & bytes.simd_eq(b'u').to_bitmask();
            if u | pending != 0 {
                pending = units.count(simd, block, u);
            }
        }
        if not_ascii != 0 {
            let first = bytes.simd_ge(0xC0).to_bitmask();
            wide += number(first);
            left_out |= not_ascii & !first;
        }
        characters += number(!left_out);
        plain += number((letter | bytes.simd_eq(b' ')).to_bitmask() & !left_out);
        blanks += number(padding);
    }
    characters -= units.digits + units.completed;
    plain = plain + units.plain - units.letters;
    wide += units.wide;
    TextShape { plain, marks: characters - plain - wide, wide, blanks }
}

/// Digits of a code unit.
const DIGITS: usize = 4;

/// The escapes `\uXXXX`.
#[derive(Default)]
struct CodeUnits {
    /// Digits that were counted as characters.
    digits: u64,
    /// Digits that were counted as letters.
    letters: u64,
    /// Escapes of an ASCII letter or a blank.
    plain: u64,
    /// Escapes of a character outside ASCII, or of the first half of a surrogate pair.
    wide: u64,
    /// Escapes of the second half of a surrogate pair.
    completed: u64,
    last: Digits,
    /// The mask of the last digits of high surrogates, in the previous block.
    last_high: u64,
}

/// Masks of a block by the value of the hexadecimal digit. Of the previous block's masks only the
/// [`tail`] is kept, because an escape may begin there.
#[derive(Default)]
struct Digits {
    /// The escaped `u` before four digits.
    u: u64,
    hex: u64,
    /// `a` to `f`.
    letters: u64,
    zero: u64,
    two: u64,
    thirteen: u64,
    /// Masks by the bits 1, 4 and 8 of the value.
    one: u64,
    four: u64,
    eight: u64,
}

impl CodeUnits {
    /// Counts the escapes that end in this block. `u`: the mask of escaped `u`s. Returns 0 if the
    /// next block needs no mask of this block. Not inlined, so that the sums stay in registers for
    /// texts without such escapes.
    #[inline(never)]
    fn count<S: Simd>(&mut self, simd: S, block: &[u8; BLOCK], u: u64) -> u64 {
        simd.vectorize(
            #[inline(always)]
            || self.count_block(u8x64::from_slice(simd, block), simd, u),
        )
    }

    #[inline(always)]
    fn count_block<S: Simd>(&mut self, bytes: u8x64<S>, simd: S, u: u64) -> u64 {
        let splat = |byte| u8x64::splat(simd, byte);
        let decimal = (bytes - splat(b'0')).simd_lt(10);
        let letter = ((bytes | splat(0x20)) - splat(b'a')).simd_lt(6);
        // The low four bits of a decimal digit are its value; the low bits of a letter are nine
        // less.
        let value = decimal.select(bytes, bytes + splat(9));
        let bit = |bit| (value & splat(bit)).simd_eq(bit).to_bitmask();
        let (one, two, four, eight) = (bit(1), bit(2), bit(4), bit(8));
        let zero = !(one | two | four | eight);
        let now = Digits {
            u,
            hex: (decimal | letter).to_bitmask(),
            letters: letter.to_bitmask(),
            zero,
            two: two & !(one | four | eight),
            thirteen: one & !two & four & eight,
            one,
            four,
            eight,
        };
        // The mask of a digit `bytes` before the end: 0 is the last digit of a code unit, 3 the
        // first.
        let back = |bytes, of: fn(&Digits) -> u64| behind(of(&now), of(&self.last), bytes);
        let ends = (0..DIGITS).fold(back(DIGITS, |d| d.u), |ends, n| ends & back(n, |d| d.hex));
        let ascii = ends & back(3, |d| d.zero) & back(2, |d| d.zero) & !back(1, |d| d.eight);
        let surrogates = ends & back(3, |d| d.thirteen) & back(2, |d| d.eight);
        let high = surrogates & !back(2, |d| d.four);
        let completing = surrogates & !high & behind(high, self.last_high, 2 + DIGITS);
        // `A` to `Z` are 0x41 to 0x5A, `a` to `z` 0x61 to 0x7A, a blank is 0x20.
        let (odd_row, over_10) = (back(1, |d| d.one), eight & (four | two & one));
        let letter = back(1, |d| d.four) & (odd_row & !over_10 | !odd_row & !zero);
        let plain = ascii & (letter | back(1, |d| d.two) & zero);
        let letters = (0..DIGITS).map(|n| number(ends & back(n, |d| d.letters))).sum::<u64>();

        self.digits += DIGITS as u64 * number(ends);
        self.letters += letters;
        self.plain += number(plain);
        self.wide += number(ends & !ascii & !completing);
        self.completed += number(completing);
        self.last_high = tail(high);
        self.last = Digits {
            u: tail(u),
            hex: tail(now.hex),
            letters: tail(now.letters),
            zero: tail(zero),
            two: tail(now.two),
            thirteen: tail(now.thirteen),
            one: tail(one),
            four: tail(four),
            eight: tail(eight),
        };
        self.last.u | self.last_high
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one_by_one(raw: &[u8]) -> TextShape {
        let mut shape = TextShape::default();
        let (mut at, mut high_before) = (0, false);
        while let Some(&byte) = raw.get(at) {
            let unit =
                raw.get(at + 2..at + 6).filter(|hex| raw[at + 1] == b'u' && hex.iter().all(u8::is_ascii_hexdigit));
            let unit = unit
                .filter(|_| byte == b'\\')
                .map(|hex| u32::from_str_radix(str::from_utf8(hex).unwrap(), 16).unwrap());
            let after_high = std::mem::take(&mut high_before);
            let kind = match (unit, byte) {
                (Some(0xDC00..0xE000), _) if after_high => None,
                (Some(code), _) => {
                    high_before = (0xD800..0xDC00).contains(&code);
                    Some(char::from_u32(code).unwrap_or('\u{ffff}'))
                }
                (None, 0x80..0xC0) => None,
                (None, 0xC0..) => Some('\u{ffff}'),
                (None, byte) if byte <= b' ' && at > 0 && raw[at - 1] <= b' ' => {
                    shape.blanks += 1;
                    None
                }
                (None, byte) => Some(char::from(byte)),
            };
            match kind {
                None => {}
                Some('a'..='z' | 'A'..='Z' | ' ') => shape.plain += 1,
                Some('\0'..='\x7f') => shape.marks += 1,
                Some(_) => shape.wide += 1,
            }
            at += match (unit, byte) {
                (Some(_), _) => 6,
                (None, b'\\') if raw.get(at + 1).is_some_and(u8::is_ascii) => 2,
                _ => 1,
            };
        }
        shape
    }

    proptest! {
        #[test]
        fn blocks_count_as_one_by_one(
            text in r#"([\\]{0,3}|u|[0-9a-fA-F]{0,5}|\\u[0-9a-f]{4}|\\u00[0-7][0-9A-F]|\\ud[89ab]11|\\ud[c-f]22|.|[ \n]{0,70}|[a-z]{0,70}|[漢é]{0,30}){0,60}"#,
            cut in 0..64_usize,
        ) {
            let raw = &text.as_bytes()[cut.min(text.len())..];
            prop_assert_eq!(TextShape::of(raw), one_by_one(raw), "{}", String::from_utf8_lossy(raw));
        }
    }

    #[test]
    fn every_code_unit_is_counted_as_what_it_stands_for() {
        for code in 0..=u16::MAX {
            // Two escapes in a row, at every place of a block.
            let raw = format!("{}\\u{code:04x}\\u{code:04X}-", "x".repeat(usize::from(code % 67)));
            assert_eq!(TextShape::of(raw.as_bytes()), one_by_one(raw.as_bytes()), "{raw}");
        }
    }
}
