//! The fast path for the events that make up nearly all of a stream.
//!
//! vLLM writes the same chunk thousands of times with different text: fixed keys in a fixed order,
//! compact, one `data:` line. Matching that template takes a few comparisons and skips three
//! strings, at about a third of the cost of scanning every key.
//!
//! The whole event is matched, with the scanner's rules for strings. At the first deviation the
//! result is `None` and the event is scanned, so both paths read an event alike. Only events with
//! content and without a finish reason match; a stream has only one or two other events.

use super::choices::OpenChoices;
use super::event::{EventKind, StreamEvent};
use super::kept_text::KeptText;
use super::not_continued::NotContinued;
use super::response::{TokenUsage, digits};
use super::scan::Scanner;

/// Reads an event of the choices dialect; `None` if it does not have the expected shape.
pub(super) fn choices(event: &[u8], memo: &mut Memo) -> Option<StreamEvent> {
    if let Some(event) = memo.recall(event) {
        return Some(event);
    }
    let mut at = Cursor(event.strip_prefix(b"data: {\"id\":")?);
    at.string()?;
    at.eat(b",\"object\":\"")?;
    let chat = at.eat(b"chat.completion.chunk").is_some();
    if !chat {
        at.eat(b"text_completion")?;
    }
    at.eat(b"\",\"created\":")?;
    at.number()?;
    at.eat(b",\"model\":")?;
    at.string()?;
    at.eat(b",\"choices\":[{\"index\":")?;
    let index = at.number()?;
    let mut is_reasoning = false;
    if chat {
        at.eat(b",\"delta\":{\"")?;
        if at.eat(b"content").is_none() {
            at.eat(b"reasoning")?;
            is_reasoning = true;
        }
        at.eat(b"\":")?;
    } else {
        at.eat(b",\"text\":")?;
    }
    let before = event.len() - at.0.len();
    let text = at.string()?;
    let after = event.len() - at.0.len();
    if chat {
        at.eat(b"}")?;
    }
    while at.null_member()?.is_some() {}
    at.eat(b"}]")?;
    let mut usage = None;
    loop {
        if at.0.starts_with(b",\"usage\":{") {
            usage = Some(at.usage()?);
            continue;
        }
        match at.null_member()? {
            Some(b"usage") => usage = None,
            Some(_) => {}
            None => break,
        }
    }
    at.eat(b"}")?;
    if !matches!(at.0, b"\n\n" | b"\r\n\r\n") {
        return None;
    }
    memo.choices.note(index, text > 0, false);
    if let Some(kept) = &mut memo.kept {
        kept.note_first(event);
        match (is_reasoning, index) {
            (true, _) if text > 0 => kept.drop_for(NotContinued::Reasoning),
            (_, 0) => kept.push(&event[before + 1..after - 1]),
            _ => kept.drop_for(NotContinued::Choices),
        }
    }
    if usage.is_none() {
        memo.remember(&event[..before], &event[after..]);
        memo.is_reasoning = is_reasoning;
    }
    Some(delta(text, usage))
}

fn delta(text: u64, usage: Option<TokenUsage>) -> StreamEvent {
    let kind = if text > 0 { EventKind::Content } else { EventKind::Empty };
    StreamEvent { kind, text, usage, ..StreamEvent::default() }
}

/// Largest number of bytes that are remembered before the text, and after it. Ids and model names
/// are far shorter.
const MAX_REMEMBERED: usize = 1 << 10;

/// Memory between events: the choices of the stream, and the bytes before and after the text in the
/// last event that matched. Id, time and model do not change within a stream, so two comparisons
/// usually match the next event.
#[derive(Clone, Debug, Default)]
pub struct Memo {
    choices: OpenChoices,
    before: Vec<u8>,
    after: Vec<u8>,
    /// Whether the last event that matched had reasoning and no text.
    is_reasoning: bool,
    kept: Option<Box<KeptText>>,
}

impl Memo {
    /// The choices of the stream.
    pub fn choices(&self) -> &OpenChoices {
        &self.choices
    }

    /// Keeps at most this many bytes of the text from now on.
    pub fn keep_text(&mut self, most: usize) {
        self.kept = Some(Box::new(KeptText::new(most)));
    }

    /// The text that is kept, if any is.
    pub fn kept(&self) -> Option<&KeptText> {
        self.kept.as_deref()
    }

    /// As [`Memo::kept`], mutable.
    pub fn kept_mut(&mut self) -> Option<&mut KeptText> {
        self.kept.as_deref_mut()
    }

    /// Keeps no text from now on.
    pub fn keep_nothing(&mut self) {
        self.kept = None;
    }

    /// Notes an event that did not match the template.
    pub(super) fn note(&mut self, index: u64, content: bool, finish: bool) {
        self.choices.note(index, content, finish);
        if finish {
            // If the choice continues after a finish reason, its next event must be noted.
            self.before.clear();
        }
    }

    fn recall(&mut self, event: &[u8]) -> Option<StreamEvent> {
        if self.before.is_empty() {
            return None;
        }
        let mut at = Cursor(event.strip_prefix(&self.before[..])?);
        let text = at.string()?;
        if at.0 != self.after {
            return None;
        }
        if let Some(kept) = &mut self.kept {
            let start = self.before.len() + 1;
            match self.is_reasoning {
                false => kept.push_from(event, start, text as usize),
                true if text > 0 => kept.drop_for(NotContinued::Reasoning),
                true => {}
            }
        }
        Some(delta(text, None))
    }

    fn remember(&mut self, before: &[u8], after: &[u8]) {
        if before.len() <= MAX_REMEMBERED && after.len() <= MAX_REMEMBERED {
            self.before.clear();
            self.before.extend_from_slice(before);
            self.after.clear();
            self.after.extend_from_slice(after);
        }
    }
}

/// The unread rest of an event.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn eat(&mut self, expected: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(expected)?;
        Some(())
    }

    /// Takes a string; returns the number of bytes between the quotes.
    fn string(&mut self) -> Option<u64> {
        if self.0.first() != Some(&b'"') {
            return None;
        }
        let mut scanner = Scanner::new(self.0);
        let text = scanner.text().ok()?;
        self.0 = &self.0[scanner.position()..];
        Some(text.raw.len() as u64)
    }

    fn number(&mut self) -> Option<u64> {
        let end = self.0.iter().position(|byte| !byte.is_ascii_digit())?;
        let (number, rest) = self.0.split_at(end);
        if number.len() > 1 && number[0] == b'0' {
            return None;
        }
        self.0 = rest;
        digits(number)
    }

    /// Takes `,"key":null` and returns the key; `Some(None)` if no member follows.
    fn null_member(&mut self) -> Option<Option<&'a [u8]>> {
        let Some(rest) = self.0.strip_prefix(b",\"") else { return Some(None) };
        let end = rest.iter().position(|byte| !(byte.is_ascii_lowercase() || *byte == b'_'))?;
        self.0 = rest[end..].strip_prefix(b"\":null")?;
        Some(Some(&rest[..end]))
    }

    fn usage(&mut self) -> Option<TokenUsage> {
        self.eat(b",\"usage\":{\"prompt_tokens\":")?;
        let prompt = self.number()?;
        self.eat(b",\"total_tokens\":")?;
        self.number()?;
        self.eat(b",\"completion_tokens\":")?;
        let completion = self.number()?;
        self.eat(b"}")?;
        Some(TokenUsage { prompt: Some(prompt), completion: Some(completion), cached: None })
    }
}
