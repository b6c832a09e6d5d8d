//! The answer so far: the text that the client has, and the identity under which it came.
//!
//! The text is kept as the engine wrote it (`core/openai/kept_text.rs`) and read here, once, when
//! an engine has failed.

use sluice_core::openai::scan::{JsonKind, ScanError, Scanner};
use sluice_core::openai::sse::Fields;
use sluice_core::openai::{KeptText, NotContinued, Route};

use super::messages::Begun;

/// Marks of reasoning inside a text. Chat templates treat a text with such marks differently.
const REASONING: [&str; 7] = ["<think", "</think", "[THINK]", "[/THINK]", "<|channel|>", "<seed:think>", "<reasoning>"];

/// The text so far, without the blanks at the end that a chat template would trim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::flow) struct Answer {
    pub(in crate::flow) text: String,
    /// The blanks after `text`, which the client has and the next engine generates again.
    pub(in crate::flow) blanks: String,
    /// Tokens that are whole in `text`: as counted by the engine if it reports them, else one for
    /// each event.
    pub(in crate::flow) tokens: u64,
    /// Whether `text` ends in a part of one more token, which the next engine counts in the prompt.
    pub(in crate::flow) has_part: bool,
}

impl Answer {
    /// Reads the text that was kept. `tokens`: the tokens of the whole text.
    pub(in crate::flow) fn of(kept: &KeptText, tokens: u64, route: Route) -> Result<Self, NotContinued> {
        let raw = std::str::from_utf8(kept.raw()?).map_err(|_| NotContinued::Unreadable)?;
        let is_chat = route != Route::Completions;
        let end = if is_chat { without_blanks(raw) } else { raw.len() };
        let decoded =
            |raw: &str| serde_json::from_str::<String>(&format!("\"{raw}\"")).map_err(|_| NotContinued::Unreadable);
        let (text, blanks) = (decoded(&raw[..end])?, decoded(&raw[end..])?);
        let (behind, has_part) = kept.pieces_behind(end);
        match () {
            () if text.contains('\u{fffd}') => Err(NotContinued::ReplacementCharacter),
            () if is_chat && text.ends_with(is_blank) => Err(NotContinued::Unreadable),
            () if is_chat && REASONING.iter().any(|mark| text.contains(mark)) => Err(NotContinued::Reasoning),
            () => Ok(Self { text, blanks, tokens: tokens.saturating_sub(behind), has_part }),
        }
    }

    /// Whether the whole text ends with the beginning of `stop`.
    pub(super) fn ends_within(&self, stop: &str) -> bool {
        let whole = format!("{}{}", self.text, self.blanks);
        stop.char_indices().skip(1).any(|(end, _)| whole.ends_with(&stop[..end]))
    }
}

/// Whether Python's `strip` removes the character.
fn is_blank(letter: char) -> bool {
    letter.is_whitespace() || matches!(letter, '\u{1c}'..='\u{1f}')
}

/// The length of `raw`, the text as in a JSON string, without the blanks at the end.
fn without_blanks(raw: &str) -> usize {
    let mut rest = raw;
    loop {
        let shorter = match rest.chars().next_back() {
            Some('n' | 'r' | 't' | 'f') => {
                let before = &rest[..rest.len() - 1];
                let backslashes = before.bytes().rev().take_while(|byte| *byte == b'\\').count();
                (backslashes % 2 == 1).then(|| &before[..before.len() - 1])
            }
            Some(last) if last.is_whitespace() => Some(&rest[..rest.len() - last.len_utf8()]),
            _ => None,
        };
        match shorter {
            Some(shorter) => rest = shorter,
            None => return rest.len(),
        }
    }
}

/// Members that are the same in all events of an answer, as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::flow) struct Identity {
    pub(super) id: String,
    pub(super) object: String,
    pub(super) created: String,
    pub(super) model: String,
    /// Set for a message of Anthropic's form.
    pub(super) message: Option<Begun>,
}

impl Identity {
    /// The name of the model, as JSON.
    pub(in crate::flow) fn model(&self) -> &str {
        &self.model
    }

    /// Reads the first event of an answer. `has_block`: whether a block of a message has begun.
    pub(in crate::flow) fn of(kept: &KeptText, route: Route, has_block: bool) -> Result<Self, NotContinued> {
        if route == Route::Messages {
            let (id, model, begun) = Begun::of(kept.first(), has_block)?;
            return Ok(Self { id, model, message: Some(begun), ..Self::default() });
        }
        let mut found = Self::default();
        let fields = Fields::of(kept.first());
        let data = fields.data.ok_or(NotContinued::Unreadable)?;
        let mut scanner = Scanner::new(&data);
        let read = scanner.object(|scanner, key| {
            let into = match &*key.bytes() {
                b"id" => &mut found.id,
                b"object" => &mut found.object,
                b"created" => &mut found.created,
                b"model" => &mut found.model,
                _ => return scanner.skip().map(drop),
            };
            let kind = scanner.kind()?;
            let raw = scanner.skip_raw()?;
            if matches!(kind, JsonKind::String | JsonKind::Number) {
                *into = String::from_utf8_lossy(raw).into_owned();
            }
            Ok::<_, ScanError>(())
        });
        let is_whole = [&found.id, &found.object, &found.created, &found.model].iter().all(|raw| !raw.is_empty());
        read.ok().filter(|_| is_whole).map(|_| found).ok_or(NotContinued::Unreadable)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use sluice_core::openai::Dialect;
    use sluice_core::openai::chunk::{self, Memo};

    /// The text of an answer whose events have these pieces, as in a JSON string.
    pub(in crate::flow::continuation) fn kept(pieces: &[&str]) -> KeptText {
        let mut memo = Memo::default();
        memo.keep_text(1 << 20);
        for piece in pieces {
            let event = format!(
                "data: {{\"id\":\"c-1\",\"object\":\"chat.completion.chunk\",\"created\":7,\"model\":\"m\",\
                 \"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{piece}\"}},\"finish_reason\":null}}]}}\n\n"
            );
            chunk::read_next(Dialect::Choices, event.as_bytes(), &mut memo);
        }
        memo.kept().unwrap().clone()
    }

    fn answer(pieces: &[&str]) -> Result<(String, String, u64), NotContinued> {
        let of = Answer::of(&kept(pieces), pieces.len() as u64, Route::ChatCompletions)?;
        Ok((of.text, of.blanks, of.tokens))
    }

    #[test]
    fn blanks_at_the_end_of_a_chat_are_set_apart_with_their_tokens() {
        let parts = |text: &str, blanks: &str, tokens| Ok((text.to_owned(), blanks.to_owned(), tokens));
        assert_eq!(answer(&["a", " b"]), parts("a b", "", 2));
        assert_eq!(answer(&["a", ".\\n", "\\n"]), parts("a.", "\n\n", 1), "only a part of the dot's piece");
        assert_eq!(answer(&["a", " ", "\\t\\r\\n", "\u{3000}"]), parts("a", " \t\r\n\u{3000}", 1));
        let of = |pieces: &[&str]| Answer::of(&kept(pieces), 9, Route::ChatCompletions).unwrap().has_part;
        assert!(of(&["a", ".\\n"]) && !of(&["a.", "\\n"]) && !of(&["a"]) && !of(&["\\n"]));
        assert_eq!(answer(&["a\\\\n"]), parts("a\\n", "", 1), "a backslash and an n");
        assert_eq!(answer(&["n"]), parts("n", "", 1));
        assert_eq!(answer(&["\\n\\n"]), parts("", "\n\n", 0));
        assert_eq!(answer(&["\\u00e9\\ud83d\\ude00", "水"]), parts("é😀水", "", 2));
        let completion = Answer::of(&kept(&["a", " "]), 2, Route::Completions).unwrap();
        assert_eq!((completion.text.as_str(), completion.blanks.as_str(), completion.tokens), ("a ", "", 2));
    }

    #[test]
    fn texts_that_cannot_be_sent_exactly_are_refused() {
        for (piece, why) in [
            ("a\u{fffd}", NotContinued::ReplacementCharacter),
            ("\\ufffd", NotContinued::ReplacementCharacter),
            ("\\ud83d", NotContinued::Unreadable),
            ("a\\u001c", NotContinued::Unreadable),
            ("<think>\\nhm", NotContinued::Reasoning),
        ] {
            assert_eq!(answer(&[piece]).map(|_| ()), Err(why), "{piece}");
        }
    }

    #[test]
    fn the_beginning_of_a_stop_string_at_the_end_is_found() {
        let ends = |pieces: &[&str], stop: &str| {
            Answer::of(&kept(pieces), 1, Route::ChatCompletions).unwrap().ends_within(stop)
        };
        assert!(ends(&["one. E"], "END") && ends(&["one. EN"], "END") && ends(&["a\\n"], "\n\n"));
        assert!(!ends(&["one. END"], "END"), "the engine has let it pass, as it does below min_tokens");
        assert!(!ends(&["one."], "END") && !ends(&["one"], "") && !ends(&["E"], "E") && ends(&["水"], "水門"));
    }

    #[test]
    fn the_identity_is_that_of_the_first_event() {
        let identity = Identity::of(&kept(&["a", "b"]), Route::ChatCompletions, true).unwrap();
        assert_eq!((identity.id.as_str(), identity.created.as_str()), ("\"c-1\"", "7"));
        assert_eq!(identity.model, "\"m\"");
        assert_eq!(Identity::of(&KeptText::default(), Route::ChatCompletions, true), Err(NotContinued::Unreadable));
    }
}
