//! What a prompt looks like without a tokenizer: a few counts from which its tokens are estimated.
//!
//! Byte-pair vocabularies treat three kinds of characters differently: (a) ASCII letters and blanks merge well (about 4 to
//! a token), (b) other ASCII (digits, punctuation, line breaks) merges badly (about 1.5 to 2), (c) every other character is
//! often a token or more. So they are counted apart and weighted by what is learned from the model's reported usage
//! (`estimate::prompt`).
//!
//! Counted on the raw bytes of a JSON string, because decoding 400 KB would cost more than the rest of the request: an
//! escape such as `\n` or `\"` is one character of kind (b), `\uXXXX` one of its own kind (a surrogate pair counts once),
//! and a UTF-8 sequence counts by its lead byte.
//!
//! A text over [`SAMPLE_OVER`] bytes is sampled: [`WINDOWS`] windows of [`WINDOW`] bytes, evenly spread, first and last
//! included, scaled up by length. So the cost of a text is bounded at 16 KiB whatever its size; the error is below 2 % on
//! uniform text, and below 1/WINDOWS of the text where two kinds follow each other in blocks.

use memchr::memchr;

use super::scan::Text;

/// Texts up to this many bytes are counted in full.
pub const SAMPLE_OVER: usize = WINDOWS * WINDOW;
/// How many windows of a longer text are counted.
pub const WINDOWS: usize = 32;
/// Bytes in a window: long enough that a character cut at its edge does not matter.
pub const WINDOW: usize = 512;

/// Characters of a text by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextShape {
    /// ASCII letters and blanks.
    pub plain: u64,
    /// Other ASCII: digits, punctuation, control characters.
    pub marks: u64,
    /// Characters outside ASCII.
    pub wide: u64,
}

impl TextShape {
    /// Counts the raw inside of a JSON string (or any raw JSON), sampling when it is long.
    pub fn of(raw: &[u8]) -> Self {
        if raw.len() <= SAMPLE_OVER {
            return count(raw);
        }
        let (mut sum, mut seen) = (Self::default(), 0u128);
        let step = (raw.len() - WINDOW) as u128;
        for index in 0..WINDOWS {
            let start = (step * index as u128 / (WINDOWS as u128 - 1)) as usize;
            let window = &raw[past_escape(raw, start)..past_escape(raw, start + WINDOW)];
            seen += window.len() as u128;
            sum.add(count(window));
        }
        let scale = |n: u64| (u128::from(n) * raw.len() as u128 / seen.max(1)) as u64;
        Self { plain: scale(sum.plain), marks: scale(sum.marks), wide: scale(sum.wide) }
    }

    /// Adds the counts of another text.
    pub fn add(&mut self, other: Self) {
        self.plain += other.plain;
        self.marks += other.marks;
        self.wide += other.wide;
    }

    /// All characters.
    pub fn characters(&self) -> u64 {
        self.plain + self.marks + self.wide
    }
}

/// Everything about a prompt that its estimate needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptShape {
    /// All text of all prompts, messages, documents and tool definitions together.
    pub text: TextShape,
    /// Prompt tokens given as ids; exact.
    pub token_ids: u64,
    /// Images, sounds, videos and files. Their bytes are not in `text`.
    pub media_parts: u32,
    /// Messages of a conversation (each costs template tokens).
    pub messages: u32,
}

impl PromptShape {
    /// Whether the prompt is only token ids, so that their number is its length.
    pub fn is_exact(&self) -> bool {
        self.token_ids > 0 && self.text == TextShape::default() && self.media_parts == 0 && self.messages == 0
    }
}

/// Receives the parts of a prompt while a body is read. Two exist: [`PromptShape`], which counts,
/// and the text collector of exact counting.
pub trait PromptSink {
    /// A piece of prompt text.
    fn text(&mut self, text: Text<'_>);
    /// Raw JSON that the chat template renders into the prompt (tool definitions, tool calls).
    fn json(&mut self, raw: &[u8]);
    /// This many tokens, given as ids.
    fn token_ids(&mut self, count: u64);
    /// An image, sound, video or file.
    fn media(&mut self);
    /// A message of the conversation begins.
    fn message(&mut self);
}

impl PromptSink for PromptShape {
    fn text(&mut self, text: Text<'_>) {
        self.text.add(TextShape::of(text.raw));
    }

    fn json(&mut self, raw: &[u8]) {
        self.text.add(TextShape::of(raw));
    }

    fn token_ids(&mut self, count: u64) {
        self.token_ids += count;
    }

    fn media(&mut self) {
        self.media_parts = self.media_parts.saturating_add(1);
    }

    fn message(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }
}

/// `at`, or the end of the escape that `at` would split; halves of escapes would count as letters and digits.
fn past_escape(raw: &[u8], at: usize) -> usize {
    for back in 1..=at.min(5) {
        if raw[at - back] == b'\\' {
            let length = if raw.get(at - back + 1) == Some(&b'u') { 6 } else { 2 };
            return (at - back + length).clamp(at, raw.len());
        }
    }
    at
}

/// Counts every byte first (a loop that the compiler vectorises), then corrects for the escapes, which are rare in most
/// texts.
fn count(raw: &[u8]) -> TextShape {
    let (mut plain, mut wide, mut tail) = (0u64, 0u64, 0u64);
    // Blocks of at most 255 bytes, so that byte-wide sums cannot overflow.
    for block in raw.chunks(255) {
        let (mut p, mut w, mut t) = (0u8, 0u8, 0u8);
        for &byte in block {
            p += u8::from((byte | 0x20).wrapping_sub(b'a') < 26 || byte == b' ');
            w += u8::from(byte >= 0xC0);
            t += u8::from(byte & 0xC0 == 0x80);
        }
        plain += u64::from(p);
        wide += u64::from(w);
        tail += u64::from(t);
    }
    let marks = raw.len() as u64 - plain - wide - tail;
    let mut shape = Signed { plain: plain as i64, marks: marks as i64, wide: wide as i64 };
    correct_escapes(raw, &mut shape);
    let clip = |n: i64| u64::try_from(n).unwrap_or(0);
    TextShape { plain: clip(shape.plain), marks: clip(shape.marks), wide: clip(shape.wide) }
}

struct Signed {
    plain: i64,
    marks: i64,
    wide: i64,
}

impl Signed {
    fn kind(&mut self, byte: u8) -> &mut i64 {
        if byte.is_ascii_alphabetic() || byte == b' ' { &mut self.plain } else { &mut self.marks }
    }
}

fn correct_escapes(raw: &[u8], shape: &mut Signed) {
    let mut at = memchr(b'\\', raw).unwrap_or(raw.len());
    while at + 1 < raw.len() {
        let second = raw[at + 1];
        let mut len = 2;
        // Both bytes were counted; the backslash alone stays, as the one mark.
        *shape.kind(second) -= i64::from(second < 0x80);
        if second == b'u'
            && let Some(code) = code_unit(&raw[at + 2..])
        {
            len = 6;
            for &digit in &raw[at + 2..at + 6] {
                *shape.kind(digit) -= 1;
            }
            shape.marks -= 1;
            match code {
                0..0x80 => *shape.kind(code as u8) += 1,
                0xDC00..0xE000 => {}
                _ => shape.wide += 1,
            }
        }
        at += len;
        if raw.get(at) != Some(&b'\\') {
            at += memchr(b'\\', raw.get(at..).unwrap_or_default()).unwrap_or(raw.len());
        }
    }
}

fn code_unit(hex: &[u8]) -> Option<u32> {
    hex.get(..4)?.iter().try_fold(0, |sum, digit| Some(sum * 16 + char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Counts characters of the decoded text, slowly.
    fn by_character(text: &str) -> TextShape {
        let mut shape = TextShape::default();
        for c in text.chars() {
            match c {
                'a'..='z' | 'A'..='Z' | ' ' => shape.plain += 1,
                '\0'..='\x7f' => shape.marks += 1,
                _ => shape.wide += 1,
            }
        }
        shape
    }

    fn python_json(text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                ' '..='~' => out.push(c),
                _ => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn raw_counts_equal_counts_of_the_decoded_text(text in "([a-z ]{0,9}|[0-9{},:\"\\\\\n]{0,5}|[äß漢字😀]{0,4}|.{0,5}){0,60}") {
            prop_assume!(python_json(&text).len() <= SAMPLE_OVER);
            let plain = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(TextShape::of(&plain.as_bytes()[1..plain.len() - 1]), by_character(&text));
            prop_assert_eq!(TextShape::of(python_json(&text).as_bytes()), by_character(&text));
        }
    }

    fn off(got: u64, want: u64) -> f64 {
        (got as f64 - want as f64).abs() / want.max(1) as f64
    }

    #[test]
    fn sampling_long_text_errs_by_less_than_two_percent() {
        for unit in [
            "The quick brown fox, 17 times. ",
            "\u{6f22}\u{5b57}\u{3068}\u{304b}\u{306a} ok ",
            "fn f(x: u8) -> u8 {\n    x + 1\n}\n",
        ] {
            for length in [20_000usize, 111_111, 400_000] {
                let text = unit.repeat(length / unit.len());
                let want = by_character(&text);
                for raw in [serde_json::to_string(&text).unwrap(), python_json(&text)] {
                    let got = TextShape::of(raw.trim_matches('"').as_bytes());
                    assert!(off(got.characters(), want.characters()) < 0.02, "{unit:?} {length}: {got:?} {want:?}");
                    assert!(
                        off(got.wide + got.plain, want.wide + want.plain) < 0.03,
                        "{unit:?} {length}: {got:?} {want:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn sampling_text_in_two_blocks_errs_by_less_than_a_window_share() {
        let (english, digits) = ("lorem ipsum dolor ".repeat(9_000), "0123456789".repeat(13_000));
        let got = TextShape::of(format!("{english}{digits}").as_bytes());
        assert!(off(got.plain, english.len() as u64) < 1.5 / WINDOWS as f64, "{got:?}");
        assert!(off(got.marks, digits.len() as u64) < 1.5 / WINDOWS as f64, "{got:?}");
    }
}
