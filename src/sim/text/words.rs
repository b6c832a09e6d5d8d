//! Synthetic text: the number of tokens of a text, and the word that a token shows.
//!
//! Without a tokenizer, each character of Chinese, Japanese and Korean scripts counts as a token.
//! All other characters together count as one token per [`CHARS_PER_TOKEN`], rounded up, which is
//! near Llama's ratio. The request's seed and the position choose a short word for each token, so
//! output is readable and repeatable. Ids are hashes of pieces, so they are stable, but do not lead
//! back to the text.

use twox_hash::XxHash3_64;

/// Characters per token of alphabetic scripts, digits, blanks and signs.
pub const CHARS_PER_TOKEN: usize = 4;

/// Ids are below this number, as are Llama 3's ordinary tokens.
pub const VOCABULARY: u64 = 128_000;

/// With the blank before it, each word is one token by the counting rule. So a text counts as many
/// tokens in a prompt as it had as an answer.
pub(super) const WORDS: [&str; 64] = [
    " the", " and", " was", " for", " but", " not", " all", " any", " how", " now", " old", " new", " two", " way",
    " day", " sun", " sky", " sea", " air", " ice", " mud", " bay", " dam", " ebb", " oar", " net", " row", " tow",
    " tie", " log", " oak", " elm", " fir", " ash", " fox", " owl", " hen", " bee", " dew", " fog", " wet", " dry",
    " low", " hot", " far", " off", " out", " its", " his", " her", " our", " who", " saw", " ran", " sat", " cut",
    " dug", " led", " met", " let", " put", " lay", " set", " via",
];

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{1100}'..='\u{11ff}' | '\u{2e80}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}'
        | '\u{ff00}'..='\u{ffef}' | '\u{20000}'..='\u{3ffff}')
}

/// Number of tokens of a text.
pub fn count(text: &str) -> usize {
    if text.is_ascii() {
        return text.len().div_ceil(CHARS_PER_TOKEN);
    }
    let (cjk, other) = text.chars().fold((0, 0), |(cjk, other), c| match is_cjk(c) {
        true => (cjk + 1, other),
        false => (cjk, other + 1),
    });
    cjk + usize::div_ceil(other, CHARS_PER_TOKEN)
}

/// Ids of the pieces of a text. Their number is [`count`], give or take one at each change of
/// script.
pub fn ids(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(count(text));
    let (mut start, mut chars) = (0, 0);
    for (at, c) in text.char_indices() {
        if is_cjk(c) || chars == CHARS_PER_TOKEN {
            if at > start {
                ids.push(id(&text[start..at]));
            }
            (start, chars) = (at, 0);
        }
        chars += 1;
        if is_cjk(c) {
            chars = CHARS_PER_TOKEN;
        }
    }
    if start < text.len() {
        ids.push(id(&text[start..]));
    }
    ids
}

fn id(piece: &str) -> u32 {
    (XxHash3_64::oneshot_with_seed(0, piece.as_bytes()) % VOCABULARY) as u32
}

/// The word at `position` of an output with this seed.
pub fn word(seed: u64, position: u32) -> &'static str {
    WORDS[(token(seed, position) % 64) as usize]
}

/// The id at `position` of an output with this seed.
pub fn token(seed: u64, position: u32) -> u32 {
    (XxHash3_64::oneshot_with_seed(seed, &position.to_le_bytes()) % VOCABULARY) as u32
}

/// The word for an id, for `/detokenize`.
pub fn word_of(id: u32) -> &'static str {
    WORDS[(id % 64) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_characters_or_one_ideogram_make_a_token() {
        assert_eq!(["", "a", "abcd", "abcde", "水門", "水門 gate"].map(count), [0, 1, 1, 2, 2, 4]);
    }

    #[test]
    fn an_answer_counts_as_many_tokens_in_a_prompt() {
        let answer: String = (0..300).map(|position| word(7, position)).collect();
        assert_eq!((count(&answer), ids(&answer).len()), (300, 300));
    }

    #[test]
    fn a_text_has_as_many_ids_as_counted() {
        for text in ["", "abcdefgh", "hello world, how are you", "水門水門"] {
            assert_eq!(ids(text).len(), count(text), "{text}");
        }
    }

    #[test]
    fn the_same_request_gets_the_same_words() {
        assert_eq!(word(7, 3), word(7, 3));
        assert_eq!(word(7, 3), word_of(token(7, 3)));
    }
}
