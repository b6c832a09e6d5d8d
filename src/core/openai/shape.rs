//! The shape of a prompt: a few counts from which its tokens are estimated without a tokenizer.
//!
//! Byte-pair vocabularies treat four kinds of characters differently: (a) ASCII letters and blanks
//! merge well (about 4 per token); (b) other ASCII (digits, punctuation, line breaks) merges badly
//! (about 1.5 to 2); (c) every other character is often a token or more; (d) a blank after a blank
//! (indentation, padding) costs almost nothing. `estimate::prompt` learns the weights of the counts
//! from reported usage. If (d) were part of (a), a client that sends blanks could make letters look
//! cheap in the estimates of all clients.
//!
//! The raw bytes of a JSON string are counted: an escape such as `\n` is one character of kind (b),
//! `\uXXXX` one of its decoded kind (a surrogate pair counts once), and a UTF-8 sequence counts by
//! its lead byte. Every byte is examined: if the text were sampled, a client could hide a long
//! prompt between the samples. 64 KiB take 3 us and 1 MiB 50 us; text that is all `\uXXXX` takes
//! six times as long.

mod text;

use super::scan::Text;
pub use text::TextShape;

/// The counts of a prompt that its estimate needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptShape {
    /// All text of all prompts, messages, documents and tool definitions together.
    pub text: TextShape,
    /// Prompt tokens that the request gives as ids, counted exactly, plus the most tokens that its
    /// tensors can have.
    pub token_ids: u64,
    /// Whether a part of the prompt was given as a tensor, so that `token_ids` is only a bound.
    pub has_tensors: bool,
    /// Images, sounds, videos and files. Their bytes are not in `text`.
    pub media_parts: u32,
    /// Messages of a conversation (each costs template tokens).
    pub messages: u32,
    /// For several prompts in a list: bytes of the longest prompt, and of all prompts together.
    pub listed: (u64, u64),
}

impl PromptShape {
    /// Whether the prompt is only token ids, so that their number is exact.
    pub fn is_exact(&self) -> bool {
        self.token_ids > 0
            && !self.has_tensors
            && self.text == TextShape::default()
            && self.media_parts == 0
            && self.messages == 0
    }

    /// Tokens of the longest of `prompts` prompts that have `tokens` together: the longest prompt's
    /// share of the bytes, but at least the mean.
    pub fn longest_prompt(&self, tokens: u64, prompts: u32) -> u64 {
        let mean = tokens.div_ceil(u64::from(prompts.max(1)));
        let (longest, all) = self.listed;
        let share = (u128::from(tokens) * u128::from(longest)).checked_div(u128::from(all)).unwrap_or(0);
        u64::try_from(share).unwrap_or(u64::MAX).clamp(mean, tokens.max(mean))
    }
}

/// Receives the parts of a prompt while a body is read. Two sinks exist: [`PromptShape`], which
/// counts characters, and the collector of text for exact counts.
pub trait PromptSink {
    /// A piece of prompt text.
    fn text(&mut self, text: Text<'_>);
    /// Raw JSON that the chat template renders into the prompt (tool definitions, tool calls).
    fn json(&mut self, raw: &[u8]);
    /// Tokens given as ids.
    fn token_ids(&mut self, count: u64);
    /// Tokens given as a tensor, at most this many. A sink that needs text treats it as media.
    fn embeddings(&mut self, _tokens: u64) {
        self.media();
    }
    /// An image, sound, video or file.
    fn media(&mut self);
    /// A message of the conversation begins.
    fn message(&mut self);
    /// The end of a list of several prompts: bytes of the longest prompt, and of all prompts
    /// together.
    fn listed(&mut self, _longest: u64, _all: u64) {}
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

    fn embeddings(&mut self, tokens: u64) {
        self.token_ids += tokens;
        self.has_tensors = true;
    }

    fn media(&mut self) {
        self.media_parts = self.media_parts.saturating_add(1);
    }

    fn message(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }

    fn listed(&mut self, longest: u64, all: u64) {
        // Of several lists, one inside another or one after another, the longest counts.
        if all > self.listed.1 {
            self.listed = (longest, all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Counts the characters of the decoded text one by one. `blanks`: how many of them are blanks
    /// that follow a blank in the raw text.
    fn by_character(text: &str, blanks: u64) -> TextShape {
        let mut shape = TextShape { blanks, ..TextShape::default() };
        for c in text.chars() {
            match c {
                'a'..='z' | 'A'..='Z' | ' ' => shape.plain += 1,
                '\0'..='\x7f' => shape.marks += 1,
                _ => shape.wide += 1,
            }
        }
        shape.plain -= blanks;
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

    fn padding(raw: &[u8]) -> u64 {
        raw.windows(2).filter(|pair| pair[0] == b' ' && pair[1] == b' ').count() as u64
    }

    proptest! {
        #[test]
        fn raw_counts_equal_counts_of_the_decoded_text(text in "([a-z ]{0,9}|[0-9{},:\"\\\\\n]{0,5}| {0,300}|[äß漢字😀]{0,4}|.{0,5}){0,60}") {
            let plain = serde_json::to_string(&text).unwrap();
            let plain = &plain.as_bytes()[1..plain.len() - 1];
            prop_assert_eq!(TextShape::of(plain), by_character(&text, padding(plain)));
            let escaped = python_json(&text);
            prop_assert_eq!(TextShape::of(escaped.as_bytes()), by_character(&text, padding(escaped.as_bytes())));
        }
    }

    #[test]
    fn a_prompt_cannot_be_hidden_between_samples() {
        // Only 32 windows of 512 bytes have escapes. A counter that samples the text might look
        // only there.
        let length = 100_000;
        let mut raw = vec![b'a'; length];
        for window in 0..32 {
            let start = (length - 512) * window / 31;
            raw[start..start + 510].copy_from_slice(&br"\udc00".repeat(85));
        }
        let letters = raw.iter().filter(|byte| **byte == b'a').count() as u64;
        let shape = TextShape::of(&raw);
        assert!(shape.plain >= letters - 32 && shape.wide >= 32 * 84, "{shape:?} of {letters} letters");
    }

    #[test]
    fn plain_text_has_no_escapes() {
        let text = TextShape::of_plain(br"a\u0061\n");
        assert_eq!((text.plain, text.marks), (3, 6));
    }

    #[test]
    fn half_a_surrogate_pair_is_a_character() {
        let wide = |raw: &[u8]| TextShape::of(raw).wide;
        assert_eq!(wide(br"\udc00\udc00\udc00"), 3);
        assert_eq!(wide(br"\ud83d\ud83d\ude00\ude00"), 3);
        assert_eq!(wide(br"\ud83dx\ude00"), 2);
    }
}
