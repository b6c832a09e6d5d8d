//! The text of a streamed answer so far, kept so that another engine can continue it.
//!
//! The readers of events append the text as the engine wrote it, still escaped, so that it can be
//! put into a request unchanged. The bytes are copied and not parsed. Once the answer has a tool
//! call, reasoning or a refusal, no engine can continue it: the text is dropped, and the reason is
//! kept.
//!
//! Bounds: the bytes that the owner permits; [`FIRST_MAX`] bytes of the first event.

use super::not_continued::NotContinued;

/// The longest first event that is kept, bytes. The first event has the answer's id, time and
/// model.
const FIRST_MAX: usize = 4 << 10;
/// Initial capacity for the text: the length of a usual answer in a chat.
const ROOM: usize = 512;
/// Pieces up to this many bytes are copied with a fixed length.
const SHORT: usize = 16;
/// Number of pieces whose ends are remembered. Blanks at the end of a text consist of fewer pieces.
const ENDS: usize = 16;

/// The text of one choice.
#[derive(Clone, Debug, Default)]
pub struct KeptText {
    raw: Vec<u8>,
    most: usize,
    /// The first event of the answer, as lines.
    first: Vec<u8>,
    /// Number of pieces so far.
    pieces: u32,
    /// The offsets in `raw` at which the last pieces end.
    ends: [u32; ENDS],
    why_not: Option<NotContinued>,
    /// Whether the engine has ended the text; only usage and the end of the answer are missing.
    is_closed: bool,
}

impl KeptText {
    /// Keeps at most this many bytes of text.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.min(u32::MAX as usize), raw: Vec::with_capacity(ROOM.min(most)), ..Self::default() }
    }

    /// The text so far, as in a JSON string, or the reason why it is not known.
    pub fn raw(&self) -> Result<&[u8], NotContinued> {
        let why_not = self.why_not.or(self.is_closed.then_some(NotContinued::UsageUnknown));
        why_not.map_or(Ok(&self.raw), Err)
    }

    /// Notes that the text is complete, and only usage and the end of the answer are missing.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// The first event; empty if there was none yet.
    pub fn first(&self) -> &[u8] {
        &self.first
    }

    /// The bytes that are kept.
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether no text is kept.
    pub fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }

    /// The number of pieces, each usually a token, that end after this offset in the text, of the
    /// last [`ENDS`]; and whether one of these pieces begins before the offset.
    pub fn pieces_behind(&self, at: usize) -> (u64, bool) {
        let ends = &self.ends[..self.pieces.min(ENDS as u32) as usize];
        let behind = ends.iter().filter(|end| **end as usize > at).count() as u64;
        (behind, behind > 0 && at > 0 && !ends.contains(&(at as u32)))
    }

    /// Why the text is not known.
    pub fn why_not(&self) -> Option<NotContinued> {
        self.why_not
    }

    /// Drops the text. Of several reasons, the first is kept.
    #[cold]
    pub fn drop_for(&mut self, why: NotContinued) {
        self.why_not.get_or_insert(why);
        (self.raw, self.most) = (Vec::new(), 0);
    }

    /// Whether the text is known and has at most this many bytes.
    #[inline]
    pub fn is_within(&self, bytes: usize) -> bool {
        self.raw.len() <= bytes && self.most > 0
    }

    /// Appends the `len` bytes of text at `start` of an event, as in a JSON string.
    #[inline]
    pub(super) fn push_from(&mut self, event: &[u8], start: usize, len: usize) {
        // Most tokens are short, and a copy of fixed length takes few instructions.
        match event.get(start..start + SHORT) {
            Some(short) if len <= SHORT && len > 0 && self.raw.len() + len <= self.most => {
                let before = self.raw.len();
                let short: [u8; SHORT] = short.try_into().unwrap_or_default();
                self.raw.extend_from_slice(&short);
                self.raw.truncate(before + len);
                self.note_end();
            }
            _ => self.push(&event[start..start + len]),
        }
    }

    #[inline]
    fn note_end(&mut self) {
        self.ends[self.pieces as usize % ENDS] = self.raw.len() as u32;
        self.pieces = self.pieces.wrapping_add(1);
    }

    /// Appends text, as in a JSON string.
    pub(super) fn push(&mut self, text: &[u8]) {
        if text.is_empty() {
            return;
        }
        // After the text was dropped, `most` is 0.
        if self.raw.len() + text.len() > self.most {
            return self.drop_for(NotContinued::TooLong);
        }
        self.raw.extend_from_slice(text);
        self.note_end();
    }

    /// Keeps the first event.
    #[inline]
    pub(super) fn note_first(&mut self, event: &[u8]) {
        if self.first.is_empty() {
            if event.len() > FIRST_MAX {
                self.drop_for(NotContinued::Unreadable);
            }
            self.first = event[..event.len().min(FIRST_MAX)].to_vec();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::chunk::{self, Memo};
    use crate::openai::event::Dialect;

    fn chat(delta: &str) -> String {
        format!(
            "data: {{\"id\":\"c-1\",\"object\":\"chat.completion.chunk\",\"created\":7,\"model\":\"m\",\"choices\":[{{\
             \"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        )
    }

    fn kept(events: &[String], most: usize) -> KeptText {
        let mut memo = Memo::default();
        memo.keep_text(most);
        for event in events {
            chunk::read_next(Dialect::Choices, event.as_bytes(), &mut memo);
        }
        memo.kept().unwrap().clone()
    }

    #[test]
    fn the_text_is_kept_as_it_was_written_whichever_path_reads_the_event() {
        let text = |text: &str| chat(&format!("{{\"content\":\"{text}\"}}"));
        let slow = |text: &str| chat(&format!("{{ \"content\" : \"{text}\" }}"));
        let events =
            [chat("{\"role\":\"assistant\",\"content\":\"\"}"), text("a\\n"), text("é\\\""), slow("😀"), text("z")];
        let kept = kept(&events, 100);
        assert_eq!(kept.raw().unwrap(), "a\\né\\\"😀z".as_bytes());
        assert_eq!(kept.first(), events[0].as_bytes());
        let behind = [(4, false), (4, true), (3, false), (2, false), (2, true), (0, false)];
        assert_eq!([0, 2, 3, 7, 8, 12].map(|at| kept.pieces_behind(at)), behind);
    }

    #[test]
    fn other_output_and_too_much_text_drop_the_text_with_the_reason() {
        let text = chat("{\"content\":\"abc\"}");
        for (delta, why) in [
            ("{\"reasoning\":\"x\"}", NotContinued::Reasoning),
            ("{\"reasoning_content\":\"x\"}", NotContinued::Reasoning),
            ("{\"tool_calls\":[{\"index\":0}]}", NotContinued::ToolCall),
            ("{\"refusal\":\"no\"}", NotContinued::Refusal),
            ("{\"content\":\"0123456789\"}", NotContinued::TooLong),
            ("{\"content\":[1,2]}", NotContinued::Unreadable),
        ] {
            for times in [1, 2] {
                let mut events = vec![text.clone()];
                events.extend(std::iter::repeat_n(chat(delta), times));
                events.push(text.clone());
                let kept = kept(&events, 12);
                assert_eq!((kept.raw(), kept.len()), (Err(why), 0), "{delta}");
            }
        }
        let harmless = ["{\"content\":null,\"tool_calls\":[]}", "{\"reasoning\":\"\"}", "{\"refusal\":null}"];
        let events: Vec<String> = harmless.iter().map(|delta| chat(delta)).chain([text]).collect();
        assert_eq!(kept(&events, 12).raw().unwrap(), b"abc");
    }

    #[test]
    fn the_text_of_an_event_that_aborts_is_not_kept() {
        let abort = chat("{\"content\":\"x\"}").replace("\"finish_reason\":null", "\"finish_reason\":\"abort\"");
        assert_eq!(kept(&[chat("{\"content\":\"abc\"}"), abort], 12).raw().unwrap(), b"abc");
    }

    #[test]
    fn the_text_of_a_message_is_kept_until_its_block_ends() {
        let message = |events: &[&str]| {
            let mut memo = Memo::default();
            memo.keep_text(12);
            for event in events {
                chunk::read_next(Dialect::Messages, event.as_bytes(), &mut memo);
            }
            (memo.kept().unwrap().raw().map(<[u8]>::to_vec), memo.kept().unwrap().first().to_vec())
        };
        let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"i\"}}\n\n";
        let block = |kind: &str| {
            format!("event: content_block_start\ndata: {{\"content_block\":{{\"type\":\"{kind}\",\"text\":\"\"}}}}\n\n")
        };
        let delta = |delta: &str| {
            format!("event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{{delta}}}}}\n\n")
        };
        let (text, word) = (block("text"), delta(r#""type":"text_delta","text":"a\n水""#));
        assert_eq!(message(&[start, &text, &word, &word]), (Ok("a\\n水a\\n水".into()), start.into()));
        for (other, why) in [
            (block("thinking"), NotContinued::Reasoning),
            (block("tool_use"), NotContinued::ToolCall),
            (delta(r#""thinking":"hm""#), NotContinued::Reasoning),
            (delta(r#""partial_json":"{""#), NotContinued::ToolCall),
            (delta(r#""text":"0123456789""#), NotContinued::TooLong),
            (
                "event: content_block_stop\ndata: {\"type\":\"content_block_stop\"}\n\n".to_owned(),
                NotContinued::UsageUnknown,
            ),
        ] {
            assert_eq!(message(&[start, &text, &word, &other]).0, Err(why), "{other}");
        }
    }
}
