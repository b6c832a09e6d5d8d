//! The output of an event: its length, and the place of a text that another engine can continue.
//!
//! The readers store nothing, so no bound is needed here.

use super::super::not_continued::NotContinued;
use super::super::scan::{JsonKind, ScanError, Scanner, Span};

/// Names of events that only keep the connection alive.
pub(super) const PINGS: [&str; 5] = ["ping", "keepalive", "keep-alive", "keep_alive", "heartbeat"];

/// The output of an event, as far as another engine can continue it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Output {
    /// The place of the text in the part of the event that was read, still escaped and without
    /// quotes.
    pub(super) text: Span,
    /// The reason why another engine cannot continue the output after this text, if any.
    pub(super) why_not: Option<NotContinued>,
}

impl Output {
    pub(super) fn known(self) -> Result<Span, NotContinued> {
        self.why_not.map_or(Ok(self.text), Err)
    }

    pub(super) fn set_text(&mut self, text: Span) {
        if !self.text.is_empty() {
            self.why_not.get_or_insert(NotContinued::Unreadable);
        }
        self.text = text;
    }

    /// Adds the output of the choice with this index.
    pub(super) fn add(&mut self, index: u64, choice: Output) {
        let why_not = if index == 0 { choice.why_not } else { Some(NotContinued::Choices) };
        self.why_not = self.why_not.or(why_not);
        if !choice.text.is_empty() {
            self.set_text(choice.text);
        }
    }
}

/// The place of the text in the string that the scanner has just taken.
pub(super) fn place(scanner: &Scanner<'_>, bytes: usize) -> Span {
    let end = scanner.position() - 1;
    Span { start: end - bytes, end }
}

/// Takes a value. Returns the length as written if it is a string, list or object that is not
/// empty, otherwise 0.
pub(super) fn output(scanner: &mut Scanner<'_>) -> Result<u64, ScanError> {
    Ok(match scanner.kind()? {
        JsonKind::String => scanner.text()?.raw.len() as u64,
        JsonKind::Array | JsonKind::Object => {
            let raw = scanner.skip_raw()?;
            let is_filled = raw[1..raw.len() - 1].iter().any(|byte| !byte.is_ascii_whitespace());
            if is_filled { raw.len() as u64 } else { 0 }
        }
        _ => scanner.skip().map(|_| 0)?,
    })
}
