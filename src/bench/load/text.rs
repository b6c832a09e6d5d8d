//! Generated text: a number of words, or, with the model's tokenizer, a number of tokens.
//!
//! Without a tokenizer, a common short word stands for a token. This is nearly exact for large
//! English vocabularies, and far off for small ones. With a tokenizer, text consists of words that
//! are one token each after a blank, so n words have n tokens. If that is not true for a sample
//! ([`ExactText::new`]), each text is encoded and cut at the right number of tokens.
//!
//! [`ExactText::adding`] sets the tokens that the server adds (special tokens, a chat template),
//! which are subtracted from each prompt. Each part of a prompt has a random number generator, so a
//! shared prefix is the same text in every prompt. Bounds: [`MAX_WORDS`].

use std::sync::Arc;

use tokenizers::Tokenizer;

use sluice_core::base::Rng;

const MAX_WORDS: usize = 512;
/// If a vocabulary has fewer words of two letters or more, single letters are words, too.
const FEW_WORDS: usize = 64;
const REPEATED: usize = 8;
const SAMPLE: u32 = 2_048;
const LONGEST: usize = 12;
/// Number of places that are tried on each side of the estimated cut.
const NEAR: usize = 16;

/// A part of a prompt: the first `count` tokens that a random number generator draws.
#[derive(Clone, Debug)]
pub(crate) struct PromptPart {
    pub(crate) rng: Rng,
    pub(crate) count: u32,
}

/// Words that are one token after a blank for common English models.
const WORDS: [&str; 32] = [
    "the", "time", "of", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "group", "country", "hand", "part", "place", "case", "week", "company", "system", "number",
    "night", "point", "home", "water", "room", "money",
];

/// Writes one word for each token.
pub(crate) fn push_words(text: &mut String, parts: &mut [PromptPart]) {
    push_any(text, &WORDS, parts);
}

fn push_any(text: &mut String, words: &[impl AsRef<str>], parts: &mut [PromptPart]) {
    let mut first = true;
    for part in parts {
        for _ in 0..part.count {
            if !std::mem::take(&mut first) {
                text.push(' ');
            }
            text.push_str(words[part.rng.below(words.len())].as_ref());
        }
    }
}

/// Writes text of an exact number of tokens.
#[derive(Clone, Debug)]
pub struct ExactText {
    vocabulary: Arc<WordList>,
    added: u32,
}

#[derive(Debug)]
struct WordList {
    tokenizer: Arc<Tokenizer>,
    words: Vec<Box<str>>,
    /// Whether n words always have n tokens.
    additive: bool,
}

impl PartialEq for ExactText {
    fn eq(&self, other: &Self) -> bool {
        self.added == other.added && Arc::ptr_eq(&self.vocabulary, &other.vocabulary)
    }
}

impl Eq for ExactText {}

impl ExactText {
    /// Finds the words of a tokenizer.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Self {
        let mut words = words(tokenizer, 2);
        if words.len() < FEW_WORDS {
            words.extend(self::words(tokenizer, 1));
        }
        if words.is_empty() {
            words.extend(WORDS.map(Box::from));
        }
        let mut list = WordList { tokenizer: Arc::clone(tokenizer), words, additive: false };
        let mut sample = String::new();
        push_any(&mut sample, &list.words, &mut [PromptPart { rng: Rng::new(1), count: SAMPLE }]);
        list.additive = list.count(&sample) == SAMPLE as usize;
        Self { vocabulary: Arc::new(list), added: 0 }
    }

    /// The same for a server that adds `tokens` to each prompt.
    #[must_use]
    pub fn adding(&self, tokens: u32) -> Self {
        Self { vocabulary: Arc::clone(&self.vocabulary), added: tokens }
    }

    /// Tokens that the server adds to a prompt.
    pub fn added(&self) -> u32 {
        self.added
    }

    /// Tokens of a text, without special tokens.
    pub fn count(&self, text: &str) -> usize {
        self.vocabulary.count(text)
    }

    /// Writes a prompt of at least one word. It has the tokens of `parts` after the server has
    /// added tokens.
    pub(crate) fn push_prompt(&self, text: &mut String, parts: &mut [PromptPart]) {
        let mut excess = self.added;
        let all: u32 = parts.iter().map(|part| part.count).sum();
        // The last parts are shortened first, because the beginning is shared. The first round
        // leaves one token of each part.
        for least in [1, 0] {
            for part in parts.iter_mut().rev() {
                let less = excess.min(part.count.saturating_sub(least));
                (part.count, excess) = (part.count - less, excess - less);
            }
        }
        if let Some(part) = parts.last_mut().filter(|_| all <= self.added) {
            part.count = 1;
        }
        self.push(text, parts);
    }

    pub(crate) fn push(&self, text: &mut String, parts: &mut [PromptPart]) {
        let list = &*self.vocabulary;
        if list.additive {
            return push_any(text, &list.words, parts);
        }
        let begin = text.len();
        let mut count = 0;
        for part in parts.iter_mut().filter(|part| part.count > 0) {
            if text.len() > begin {
                text.push(' ');
            }
            count += part.count as usize;
            let fitted = list.fit(&text[begin..], &mut part.rng, count);
            text.truncate(begin);
            text.push_str(&fitted);
        }
    }
}

impl WordList {
    fn count(&self, text: &str) -> usize {
        self.tokenizer.encode_fast(text, false).map_or(0, |encoding| encoding.get_ids().len())
    }

    /// The text `before` and further words, cut at `wanted` tokens in all, or as near as possible.
    fn fit(&self, before: &str, rng: &mut Rng, wanted: usize) -> String {
        let mut text = before.to_owned();
        let mut words = wanted.max(1);
        loop {
            push_any(&mut text, &self.words, &mut [PromptPart { rng: rng.clone(), count: words as u32 }]);
            if self.count(&text) >= wanted || words > 8 * wanted {
                break;
            }
            text.truncate(before.len());
            words *= 2;
        }
        let least = (before.len() + 1).min(text.len());
        let (mut low, mut high) = (least, text.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.count(&text[..middle]) < wanted { low = middle + 1 } else { high = middle }
        }
        // A chat template may strip a blank at the end, so texts that end with a blank are not
        // used; a letter may be added instead.
        let cuts = low.saturating_sub(NEAR).max(least)..=(low + NEAR).min(text.len());
        let ends = cuts.flat_map(|cut| ["", "s", "z"].map(|end| format!("{}{end}", &text[..cut])));
        let nearest = ends.filter(|text| !text.ends_with(' ')).min_by_key(|text| self.count(text).abs_diff(wanted));
        nearest.unwrap_or(text)
    }
}

/// Words of at least `letters` letters (exactly 1 for 1) that are one token after a blank.
fn words(tokenizer: &Tokenizer, letters: usize) -> Vec<Box<str>> {
    let lengths = if letters == 1 { 1..=1 } else { letters..=LONGEST };
    let mut found: Vec<Box<str>> = Vec::new();
    for id in 0..tokenizer.get_vocab_size(false) as u32 {
        let Some(token) = tokenizer.id_to_token(id) else { continue };
        // The characters that stand for a blank in byte-level vocabularies and in SentencePiece.
        let word = token.trim_start_matches(['\u{120}', '\u{2581}']);
        if !lengths.contains(&word.len()) || !word.bytes().all(|byte| byte.is_ascii_lowercase()) {
            continue;
        }
        let repeated = [word; REPEATED].join(" ");
        let one_each = tokenizer.encode_fast(repeated, false).is_ok_and(|all| all.get_ids().len() == REPEATED);
        if one_each && !found.iter().any(|known| **known == *word) {
            found.push(word.into());
        }
        if found.len() == MAX_WORDS {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests;
