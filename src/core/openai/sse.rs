//! Finds the events in a stream of server-sent events, however it is cut into chunks.
//!
//! An event ends at an empty line; lines end with `\n` or `\r\n`. (The standard also allows a bare
//! `\r`, which no engine sends; here it does not end a line.) [`SseScanner::feed`] calls back for
//! each event that the chunk completes, including the empty line. An event that lies whole in the
//! chunk is a slice of it; a split event is assembled in a buffer.
//!
//! Bound: the buffer never exceeds [`MAX_EVENT`]. A longer event is handed over in pieces
//! ([`Scanned::Piece`]) and not kept; [`SseScanner::release`] returns the bytes held before it
//! became too long. Cost: one `memchr` per line; no allocation unless an event is split.

use std::borrow::Cow;

use memchr::memchr;

/// The longest event that is assembled, bytes. vLLM's events are below 1 KiB, with logprobs some
/// tens of KiB; only events that repeat the request or the whole answer are longer.
pub const MAX_EVENT: usize = 1 << 20;

/// Bytes of capacity that the buffer may keep after an event.
const KEEP_CAPACITY: usize = 64 << 10;

/// A finding in the chunk just fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scanned<'a> {
    /// An event that ended in the chunk.
    Event(RawEvent<'a>),
    /// The next piece of an event that is over [`MAX_EVENT`], from the first byte on.
    Piece(&'a [u8]),
}

/// An event that ended in the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawEvent<'a> {
    /// The bytes of the event, with the empty line that ends it. If it was split and too long: only
    /// the bytes still held from earlier chunks, usually none.
    pub bytes: &'a [u8],
    /// Offset in the chunk after the last byte of the event.
    pub end: usize,
    /// Whether the event began in an earlier chunk.
    pub split: bool,
    /// Whether the event is over [`MAX_EVENT`]. If it was also split, the bytes were not kept.
    pub oversize: bool,
}

/// The state between chunks of one stream.
#[derive(Clone, Debug, Default)]
pub struct SseScanner {
    carry: Vec<u8>,
    line: Line,
    /// Whether an event has begun in an earlier chunk.
    open: bool,
    oversize: bool,
}

/// The content of the unfinished line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    /// Only `\r`: empty if `\n` follows.
    Return,
    Filled,
}

impl SseScanner {
    /// A scanner at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Scans the next chunk. Calls `found` for each event that ends in it, and for each piece of a
    /// long event, in order.
    pub fn feed(&mut self, chunk: &[u8], mut found: impl FnMut(Scanned<'_>)) {
        let mut event_start = 0;
        let mut line_start = 0;
        while let Some(newline) = newline(chunk, line_start) {
            let line = self.line.extended(&chunk[line_start..newline]);
            self.line = Line::Empty;
            line_start = newline + 1;
            if line != Line::Filled {
                self.complete(&chunk[event_start..line_start], line_start, &mut found);
                event_start = line_start;
            }
        }
        self.line = self.line.extended(&chunk[line_start..]);
        if event_start < chunk.len() {
            self.keep(&chunk[event_start..], &mut found);
            self.open = true;
        }
    }

    /// Bytes of the unfinished event, as far as they are kept.
    pub fn pending(&self) -> &[u8] {
        &self.carry
    }

    /// Whether the unfinished event has grown too long to be kept.
    pub fn pending_oversize(&self) -> bool {
        self.oversize
    }

    /// Takes the bytes that were kept of an event before it became too long. Must be called after
    /// each feed.
    pub fn release(&mut self) -> Vec<u8> {
        if self.oversize { std::mem::take(&mut self.carry) } else { Vec::new() }
    }

    fn complete(&mut self, rest: &[u8], end: usize, found: &mut impl FnMut(Scanned<'_>)) {
        if !self.open {
            let oversize = rest.len() > MAX_EVENT;
            found(Scanned::Event(RawEvent { bytes: rest, end, split: false, oversize }));
            return;
        }
        self.keep(rest, found);
        found(Scanned::Event(RawEvent { bytes: &self.carry, end, split: true, oversize: self.oversize }));
        self.carry.clear();
        self.carry.shrink_to(KEEP_CAPACITY);
        self.open = false;
        self.oversize = false;
    }

    fn keep(&mut self, part: &[u8], found: &mut impl FnMut(Scanned<'_>)) {
        if !self.oversize && self.carry.len() + part.len() <= MAX_EVENT {
            self.carry.extend_from_slice(part);
            return;
        }
        if !std::mem::replace(&mut self.oversize, true) {
            found(Scanned::Piece(&self.carry));
        }
        found(Scanned::Piece(part));
    }
}

/// The next line end from `at` on. The end of an empty line directly follows another line end, so
/// the byte at `at` is checked before a search.
fn newline(chunk: &[u8], at: usize) -> Option<usize> {
    match chunk.get(at)? {
        b'\n' => Some(at),
        _ => memchr(b'\n', &chunk[at..]).map(|offset| at + offset),
    }
}

impl Line {
    fn extended(self, more: &[u8]) -> Self {
        match (self, more) {
            (_, []) => self,
            (Self::Empty, b"\r") => Self::Return,
            _ => Self::Filled,
        }
    }
}

/// The fields of an event that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields<'a> {
    /// The last `event:` line, if there is one.
    pub name: Option<&'a [u8]>,
    /// The `data:` lines joined by `\n`, if there is one; borrowed if there is exactly one.
    pub data: Option<Cow<'a, [u8]>>,
}

impl<'a> Fields<'a> {
    /// Reads the lines of an event. Comments and other fields are ignored.
    pub fn of(event: &'a [u8]) -> Self {
        let mut fields = Self::default();
        let mut rest = event;
        while !rest.is_empty() {
            let end = memchr(b'\n', rest).unwrap_or(rest.len());
            let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
            rest = rest.get(end + 1..).unwrap_or_default();
            if let Some(value) = value_of(line, b"data") {
                fields.data = Some(match fields.data.take() {
                    None => Cow::Borrowed(value),
                    Some(before) => Cow::Owned([&before, &b"\n"[..], value].concat()),
                });
            } else if let Some(value) = value_of(line, b"event") {
                fields.name = Some(value);
            }
        }
        fields
    }
}

/// The value of a line `name: value`; the blank after the colon is optional.
fn value_of<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let value = line.strip_prefix(name)?;
    if value.is_empty() {
        return Some(value);
    }
    let value = value.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut scanner = SseScanner::new();
        let mut out = Vec::new();
        for chunk in chunks {
            scanner.feed(chunk, |found| match found {
                Scanned::Event(event) => out.push(event.bytes.to_vec()),
                Scanned::Piece(_) => unreachable!(),
            });
        }
        out
    }

    #[test]
    fn events_end_at_empty_lines_of_either_kind() {
        let text = b"data: 1\n\ndata: 2\r\n\r\n: keep-alive\n\nevent: x\ndata: 3\n\ndata: 4";
        let want: Vec<&[u8]> = vec![b"data: 1\n\n", b"data: 2\r\n\r\n", b": keep-alive\n\n", b"event: x\ndata: 3\n\n"];
        assert_eq!(events(&[text]), want);
    }

    #[test]
    fn fields_are_read_and_comments_are_not() {
        let fields = Fields::of(b": note\nevent: a\ndata: 1\ndata:2\r\nid: 7\n\n");
        assert_eq!(fields.name, Some(&b"a"[..]));
        assert_eq!(fields.data.as_deref(), Some(&b"1\n2"[..]));
        assert_eq!(Fields::of(b": keep-alive\n\n"), Fields::default());
        assert_eq!(Fields::of(b"database: 1\n\n").data, None);
    }

    #[test]
    fn an_event_over_the_bound_takes_no_memory_and_the_next_event_is_found() {
        let mut scanner = SseScanner::new();
        let (mut pieces, mut oversize, mut seen) = (0, 0, Vec::new());
        for _ in 0..40 {
            scanner.feed(&[b'x'; 64 << 10], |found| match found {
                Scanned::Piece(piece) => pieces += piece.len(),
                Scanned::Event(_) => unreachable!(),
            });
            assert!(scanner.carry.capacity() <= 2 * MAX_EVENT);
            scanner.release();
        }
        assert!(scanner.pending_oversize() && scanner.pending().is_empty());
        scanner.feed(b"x\n\ndata: 1\n\n", |found| match found {
            Scanned::Piece(piece) => pieces += piece.len(),
            Scanned::Event(event) => {
                oversize += u32::from(event.oversize);
                seen.push(event.bytes.to_vec());
            }
        });
        assert_eq!((oversize, seen), (1, vec![Vec::new(), b"data: 1\n\n".to_vec()]));
        assert_eq!(pieces, 40 * (64 << 10) + 3, "every byte of it was handed over");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_events(
            parts in prop::collection::vec("(data: [a-z]{0,9}|: c|event: e|\r|\r\r|)(\n|\r\n|\n\n|\r\n\r\n)", 0..20),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let text = parts.concat().into_bytes();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let whole = events(&[&text]);
            prop_assert_eq!(events(&chunks), whole.clone());
            let bytes: Vec<&[u8]> = text.chunks(1).collect();
            prop_assert_eq!(events(&bytes), whole.clone());
            prop_assert!(text.starts_with(&whole.concat()));
        }
    }
}
