//! Hashes of the beginnings of a prompt, to recognise requests that share a beginning.
//!
//! An engine's prefix cache keeps the blocks of a prompt by a hash of all tokens up to the end of
//! the block. The gateway has no tokens, so it hashes the bytes as sent. Each hash covers the model
//! and all bytes up to the end of a beginning, so two prompts for one model have the same hash if
//! they agree up to there. The next turn of a conversation repeats the bytes of the previous turn.
//! Members are hashed in the order of a rendered prompt: members that change the template or the
//! cache, then instructions, tools, messages.
//!
//! A beginning ends after each [`STEP`] bytes. From 8 steps on, each beginning is an eighth longer
//! than the one before, so a prompt of 1 MB has 55. Bound: [`BYTES_MAX`] bytes of a prompt are
//! hashed, in one pass of XXH3, about 0.1 us per kilobyte.

use smallvec::SmallVec;
use twox_hash::XxHash3_64;

use super::scan::Span;

/// Bytes between the ends of short beginnings.
pub const STEP: usize = 512;
/// The version of records that have these hashes. It changes when beginnings end elsewhere, or when
/// a key gets another meaning.
pub const RECORD_VERSION: u32 = 1;
/// The most bytes of a prompt that are hashed.
const BYTES_MAX: usize = 1 << 20;

/// Members of a request that are not part of the prompt but change how an engine renders or caches
/// it.
const CONTEXT: &[&[u8]] = &[b"cache_salt", b"chat_template", b"chat_template_kwargs", b"tool_choice"];

/// The positions of the parts of a prompt in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptParts(SmallVec<[(u8, Span); 2]>);

impl PromptParts {
    /// Adds the value of a member. `is_prompt`: whether the value is part of the prompt. Other
    /// members are added only if they are in [`CONTEXT`].
    pub(super) fn add(&mut self, key: &[u8], span: Span, is_prompt: bool) {
        let place = match key {
            b"system" | b"instructions" if is_prompt => 1,
            b"tools" | b"functions" | b"documents" if is_prompt => 2,
            _ if is_prompt => 3,
            key if CONTEXT.contains(&key) => 0,
            _ => return,
        };
        self.0.push((place, span));
    }
}

/// The ends of the beginnings of every prompt, bytes.
pub fn ends() -> impl Iterator<Item = usize> {
    std::iter::successors(Some(STEP), |end| Some(after(*end))).take_while(|end| *end <= BYTES_MAX)
}

/// The end of the next beginning.
fn after(end: usize) -> usize {
    end + STEP.max(end / 8)
}

/// One beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// Hash of all bytes up to `end`.
    pub hash: u64,
    /// The end: bytes from the start of the prompt.
    pub end: u32,
}

/// The beginnings of one prompt, each longer than the one before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPrefix {
    /// The beginnings.
    pub beginnings: SmallVec<[Beginning; 8]>,
    /// Bytes of the whole prompt.
    pub bytes: usize,
}

impl PromptPrefix {
    /// Hashes the prompt in `body` for `model`. Prompts for different models have different hashes,
    /// because engines do not share blocks between models (or adapters).
    pub fn new(body: &[u8], parts: &PromptParts, model: &str) -> Self {
        let mut parts = parts.0.clone();
        parts.sort_by_key(|(place, _)| *place);
        let texts = parts.iter().filter_map(|(_, span)| body.get(span.start..span.end));
        let mut prefix = Self { bytes: texts.clone().map(<[u8]>::len).sum(), ..Self::default() };
        let (mut hash, mut read, mut end) = (XxHash3_64::oneshot(model.as_bytes()), 0, STEP);
        for mut text in texts {
            while !text.is_empty() && end <= BYTES_MAX {
                let (piece, rest) = text.split_at(text.len().min(end - read));
                (hash, read, text) = (XxHash3_64::oneshot_with_seed(hash, piece), read + piece.len(), rest);
                if read == end {
                    prefix.beginnings.push(Beginning { hash, end: end as u32 });
                    end = after(end);
                }
            }
        }
        prefix
    }

    /// The first `bytes` of the prompt as a share of the whole prompt, 0 to 1.
    pub fn share(&self, bytes: u32) -> f64 {
        if self.bytes == 0 { 0.0 } else { f64::from(bytes) / self.bytes as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Route, request};
    use super::*;

    fn prefix_of(body: &str) -> PromptPrefix {
        let view = request::read(Route::ChatCompletions, body.as_bytes()).unwrap();
        PromptPrefix::new(body.as_bytes(), &view.prompt_parts, "m")
    }

    /// The end of the longest beginning that two prompts share.
    fn shared(one: &PromptPrefix, other: &PromptPrefix) -> u32 {
        let both = one.beginnings.iter().zip(&other.beginnings);
        both.take_while(|(one, other)| one == other).last().map_or(0, |(one, _)| one.end)
    }

    fn message(role: &str, seed: u32, words: u32) -> String {
        let text: String = (0..words).map(|word| format!("{} ", word * seed)).collect();
        format!(r#"{{"role":"{role}","content":"{text}"}}"#)
    }

    #[test]
    fn beginnings_end_where_they_are_said_to() {
        let long = prefix_of(&format!(r#"{{"messages":[{}]}}"#, message("user", 3, 400_000)));
        let found: Vec<usize> = long.beginnings.iter().map(|beginning| beginning.end as usize).collect();
        assert!(found.len() > 50 && found == ends().collect::<Vec<_>>(), "{found:?}");
    }

    #[test]
    fn a_later_turn_begins_with_the_turn_before_it_in_whatever_order_the_members_are() {
        let (system, user, reply) = (message("system", 3, 400), message("user", 5, 300), message("assistant", 7, 50));
        let first = format!(r#"{{"model":"m","messages":[{system},{user}],"stream":true}}"#);
        let more = message("user", 11, 20);
        let second = format!(r#"{{"max_tokens":5,"stream":true,"messages":[{system},{user},{reply},{more}]}}"#);
        let (first, second) = (prefix_of(&first), prefix_of(&second));
        let all = first.beginnings.last().unwrap().end;
        assert_eq!(shared(&first, &second), all);
        assert!(first.bytes - (all as usize) < STEP && second.beginnings.len() > first.beginnings.len(), "{first:?}");
        let other = prefix_of(&format!(r#"{{"messages":[{system},{}]}}"#, message("user", 13, 300)));
        let agreed = shared(&first, &other);
        assert!(agreed <= system.len() as u32 + 40 && agreed + 512 > system.len() as u32, "{agreed} {}", system.len());
    }

    #[test]
    fn what_makes_the_prompt_another_one_to_an_engine_shares_nothing() {
        let messages = message("user", 3, 400);
        let plain = format!(r#"{{"messages":[{messages}]}}"#);
        let known = prefix_of(&plain);
        assert!(known.beginnings.len() > 2);
        for member in [r#""cache_salt":"a""#, r#""tools":[{"type":"function"}]"#, r#""chat_template":"{{x}}""#] {
            let other = prefix_of(&format!(r#"{{"messages":[{messages}],{member}}}"#));
            assert_eq!(shared(&known, &other), 0, "{member}");
        }
        let view = request::read(Route::ChatCompletions, plain.as_bytes()).unwrap();
        assert_eq!(shared(&known, &PromptPrefix::new(plain.as_bytes(), &view.prompt_parts, "adapter")), 0);
    }

    #[test]
    fn a_long_prompt_has_few_beginnings_and_no_more_than_the_bound_is_hashed() {
        let body = format!(r#"{{"messages":[{}]}}"#, message("user", 3, 400_000));
        let prefix = prefix_of(&body);
        let last = prefix.beginnings.last().unwrap().end as usize;
        assert!(prefix.bytes > 2 * BYTES_MAX && last <= BYTES_MAX && last > BYTES_MAX / 2);
        assert!(prefix.beginnings.len() <= 55, "{}", prefix.beginnings.len());
        assert_eq!(prefix_of(r#"{"messages":[]}"#).beginnings.len(), 0);
    }
}
