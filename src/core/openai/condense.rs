//! Condenses a JSON object that arrives in pieces, in bounded memory.
//!
//! A terminal event may repeat a request of megabytes, and 100 MB of embeddings may precede the
//! usage. So each member is handed to the reader when it ends, as an object with this one member.
//! Long strings are cut ([`TEXT`]), and of an array only the first element is kept. Members of
//! `response` and `message`, and elements of `choices`, are handed over one by one in the same way:
//! `{"response":{"usage":{...}}}`. A reader of the parts finds the same values as a reader of the
//! whole, however the bytes are cut.
//!
//! The bytes that are left out are stepped over without a syntax check. Outside strings only
//! brackets and quotes matter, and the search for them examines [`BLOCK`] bytes at a time without a
//! branch. Bounds: a part takes at most [`PART`] bytes and a few strings; members that do not fit
//! are left out.

use memchr::memchr2;

/// Bytes of a string that are kept, still escaped. An error message fits even if every character is
/// escaped.
const TEXT: usize = 6 * super::response::MAX_MESSAGE;
/// Bytes of a key that are kept. Every key that a reader looks for is shorter.
const KEY: usize = 128;
/// Largest number or literal, bytes. Engines write shorter numbers.
const SCALAR: usize = 64;
/// A part of this many bytes takes no further member.
const PART: usize = 16 << 10;
/// In a part of this many bytes, a nested container takes no further member, so that members after
/// it still have room.
const NESTED: usize = PART / 2;
/// Nesting depth up to which a part is kept.
const DEPTH: u32 = 8;
/// Bytes that are examined at a time when stepping over.
const BLOCK: usize = 32;

/// Reads a JSON object piece by piece.
#[derive(Clone, Debug)]
pub struct Condenser {
    state: State,
    within: Within,
    /// Number of open containers, without those that are stepped over.
    depth: u32,
    /// A bit for each open container: whether it is an object.
    objects: u32,
    /// The open part, from `{` on.
    part: Vec<u8>,
}

/// The syntax that may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Start,
    /// A value; with `first`, also the end of an empty array.
    Value {
        first: bool,
    },
    /// A key; with `first`, also the end of an empty object.
    Key {
        first: bool,
    },
    Colon,
    Text(Text),
    /// Inside a number or literal.
    Scalar {
        kept: usize,
    },
    /// After a value.
    After,
    Skip(Skip),
    Done,
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Text {
    is_key: bool,
    /// Number of bytes kept; [`CUT`] if the rest is not kept.
    kept: usize,
    escape: Escape,
}

const CUT: usize = usize::MAX;

impl Text {
    const VALUE: Self = Self { is_key: false, kept: 0, escape: Escape::No };
    const KEY: Self = Self { is_key: true, ..Self::VALUE };
}

/// Stepping over the rest of the open container, or over a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Skip {
    /// Whether one value, a container, is stepped over. The part then has `null` in place of the
    /// value.
    is_value: bool,
    /// Number of open containers in the bytes that are stepped over.
    inside: u32,
    /// Whether the next byte is inside a string.
    quoted: bool,
    /// Whether it follows a backslash in the string.
    escaped: bool,
}

impl Skip {
    const REST: Self = Self { is_value: false, inside: 0, quoted: false, escaped: false };
    const VALUE: Self = Self { is_value: true, inside: 1, ..Self::REST };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    No,
    /// After the backslash.
    Begun,
    /// This many hexadecimal digits follow.
    Digits(u8),
}

/// The container whose members or elements are the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    Root,
    /// The object with this name in the root.
    Member(&'static str),
    /// The array `choices`.
    Choices,
}

impl Within {
    /// The depth at which values of parts begin.
    fn depth(self) -> u32 {
        if self == Self::Root { 1 } else { 2 }
    }
}

impl Default for Condenser {
    fn default() -> Self {
        Self { state: State::Start, within: Within::Root, depth: 0, objects: 0, part: Vec::new() }
    }
}

impl Condenser {
    /// Takes the next bytes; calls `part` for each part that ends in them.
    pub fn feed(&mut self, bytes: &[u8], mut part: impl FnMut(&[u8])) {
        let mut at = 0;
        while at < bytes.len() {
            at += match self.state {
                State::Skip(skip) => self.skip(&bytes[at..], skip, &mut part),
                State::Text(text) => self.text(&bytes[at..], text, &mut part),
                State::Scalar { kept } => self.scalar(&bytes[at..], kept, &mut part),
                State::Broken => return,
                _ => {
                    self.structure(bytes[at], &mut part);
                    1
                }
            };
        }
    }

    /// Whether the object has ended, with only blanks after it.
    pub fn is_complete(&self) -> bool {
        self.state == State::Done
    }

    fn structure(&mut self, byte: u8, part: &mut impl FnMut(&[u8])) {
        if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
            return;
        }
        self.state = match (self.state, byte) {
            // A byte order mark.
            (State::Start, 0xEF | 0xBB | 0xBF) => State::Start,
            (State::Start, b'{') => {
                (self.depth, self.objects) = (1, 1 << 1);
                State::Key { first: true }
            }
            (State::Value { .. }, b'{' | b'[') => self.open(byte),
            (State::Value { .. }, b'"') => {
                self.begin_value();
                self.part.push(b'"');
                State::Text(Text::VALUE)
            }
            (State::Value { .. }, b'-' | b'0'..=b'9' | b'a'..=b'z' | b'N' | b'I') => {
                self.begin_value();
                self.part.push(byte);
                State::Scalar { kept: 1 }
            }
            (State::Value { first: true }, b']') => self.close(part),
            (State::Key { first: true }, b'}') => self.close(part),
            (State::Key { .. }, b'"') => self.key(),
            (State::Colon, b':') => {
                self.part.push(b':');
                State::Value { first: false }
            }
            (State::After, b',') if self.is_object() => State::Key { first: false },
            (State::After, b',') if self.within == Within::Choices && self.depth == 2 => State::Value { first: false },
            // The rest of an array is stepped over: the first element shows that it is not empty.
            (State::After, b',') => State::Skip(Skip::REST),
            (State::After, b'}') if self.is_object() => self.close(part),
            (State::After, b']') if !self.is_object() => self.close(part),
            _ => State::Broken,
        };
    }

    fn is_object(&self) -> bool {
        self.objects & (1 << self.depth) != 0
    }

    /// Whether the open container is the one whose members or elements are the parts.
    fn is_between_parts(&self) -> bool {
        self.depth == self.within.depth()
    }

    /// Begins a key of the open object, or steps over the rest of the object if there is no room.
    fn key(&mut self) -> State {
        if self.is_between_parts() {
            self.part.clear();
            self.part.push(b'{');
            if let Within::Member(name) = self.within {
                self.part.extend([&b"\""[..], name.as_bytes(), b"\":{"].concat());
            }
        } else {
            let room = if self.depth == self.within.depth() + 1 { PART } else { NESTED };
            if self.part.len() > room {
                return State::Skip(Skip { quoted: true, ..Skip::REST });
            }
            if self.part.last() != Some(&b'{') {
                self.part.push(b',');
            }
        }
        self.part.push(b'"');
        State::Text(Text::KEY)
    }

    /// Begins a value. An element of `choices` is a part.
    fn begin_value(&mut self) {
        if self.within == Within::Choices && self.is_between_parts() {
            self.part.clear();
            self.part.extend_from_slice(b"{\"choices\":[");
        }
    }

    fn open(&mut self, bracket: u8) -> State {
        let is_object = bracket == b'{';
        let first = if is_object { State::Key { first: true } } else { State::Value { first: true } };
        let named = match (&self.part[..], is_object) {
            _ if self.within != Within::Root || self.depth != 1 => None,
            (b"{\"response\":", true) => Some(Within::Member("response")),
            (b"{\"message\":", true) => Some(Within::Member("message")),
            (b"{\"choices\":", false) => Some(Within::Choices),
            _ => None,
        };
        if let Some(named) = named {
            self.within = named;
        } else {
            self.begin_value();
            if self.depth >= self.within.depth() + DEPTH {
                self.part.extend_from_slice(b"null");
                return State::Skip(Skip::VALUE);
            }
            self.part.push(bracket);
        }
        self.depth += 1;
        self.objects = self.objects & !(1 << self.depth) | (u32::from(is_object) << self.depth);
        first
    }

    fn close(&mut self, part: &mut impl FnMut(&[u8])) -> State {
        let bracket = if self.is_object() { b'}' } else { b']' };
        let is_part_of_part = !self.is_between_parts();
        self.depth -= 1;
        if self.depth == 0 {
            return State::Done;
        }
        if !is_part_of_part {
            if self.within == Within::Choices {
                // An empty `choices` is reported too, because the presence matters.
                part(b"{\"choices\":[]}");
            }
            self.within = Within::Root;
            return State::After;
        }
        self.part.push(bracket);
        self.value_ended(part)
    }

    /// Ends a value, and hands it over if it is a part.
    fn value_ended(&mut self, part: &mut impl FnMut(&[u8])) -> State {
        if self.is_between_parts() {
            self.part.extend_from_slice(match self.within {
                Within::Root => b"}",
                Within::Member(_) => b"}}",
                Within::Choices => b"]}",
            });
            part(&self.part);
            self.part.clear();
            self.part.shrink_to(PART);
        }
        State::After
    }

    /// Steps over bytes; returns how many.
    fn skip(&mut self, bytes: &[u8], mut skip: Skip, part: &mut impl FnMut(&[u8])) -> usize {
        let mut at = usize::from(std::mem::take(&mut skip.escaped));
        while at < bytes.len() {
            let rest = &bytes[at..];
            let found = if skip.quoted { memchr2(b'"', b'\\', rest) } else { bracket_or_quote(rest) };
            let Some(found) = found else { break };
            at += found + 1;
            match bytes[at - 1] {
                b'"' => skip.quoted = !skip.quoted,
                b'\\' => at += 1,
                b'{' | b'[' => skip.inside = skip.inside.saturating_add(1),
                _ if skip.inside > u32::from(skip.is_value) => skip.inside -= 1,
                _ => {
                    self.state = if skip.is_value { self.value_ended(part) } else { self.close(part) };
                    return at;
                }
            }
        }
        skip.escaped = at > bytes.len();
        self.state = State::Skip(skip);
        bytes.len()
    }

    fn text(&mut self, bytes: &[u8], mut text: Text, part: &mut impl FnMut(&[u8])) -> usize {
        let most = if text.is_key { KEY } else { TEXT };
        if text.escape != Escape::No {
            // Of an escape, either all bytes are kept or none.
            if text.kept != CUT {
                self.part.push(bytes[0]);
                text.kept += 1;
            }
            text.escape = match (text.escape, bytes[0]) {
                (Escape::Begun, b'u') => Escape::Digits(4),
                (Escape::Digits(left @ 2..), _) => Escape::Digits(left - 1),
                _ => Escape::No,
            };
            self.state = State::Text(text);
            return 1;
        }
        let end = memchr2(b'"', b'\\', bytes);
        let plain = end.unwrap_or(bytes.len());
        let room = plain.min(most.saturating_sub(text.kept));
        self.part.extend_from_slice(&bytes[..room]);
        text.kept = if room < plain { CUT } else { text.kept.saturating_add(plain) };
        match end.map(|end| bytes[end]) {
            None => {
                self.state = State::Text(text);
                return plain;
            }
            Some(b'"') => {
                self.part.push(b'"');
                self.state = if text.is_key { State::Colon } else { self.value_ended(part) };
            }
            Some(_) => {
                if text.kept < most {
                    self.part.push(b'\\');
                    text.kept += 1;
                } else {
                    text.kept = CUT;
                }
                self.state = State::Text(Text { escape: Escape::Begun, ..text });
            }
        }
        plain + 1
    }

    fn scalar(&mut self, bytes: &[u8], kept: usize, part: &mut impl FnMut(&[u8])) -> usize {
        let is_end = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t');
        let end = bytes.iter().position(is_end);
        let more = end.unwrap_or(bytes.len());
        if kept + more > SCALAR {
            self.state = State::Broken;
            return more;
        }
        self.part.extend_from_slice(&bytes[..more]);
        self.state = if end.is_some() { self.value_ended(part) } else { State::Scalar { kept: kept + more } };
        more
    }
}

fn bracket_or_quote(bytes: &[u8]) -> Option<usize> {
    // The brackets `[` and `]` differ from `{` and `}` in one bit.
    let is_one = |byte: u8| ((byte | 0x20) == b'{') | ((byte | 0x20) == b'}') | (byte == b'"');
    let clear =
        bytes.chunks_exact(BLOCK).take_while(|block| !block.iter().fold(false, |any, byte| any | is_one(*byte)));
    let from = clear.count() * BLOCK;
    bytes[from..].iter().position(|byte| is_one(*byte)).map(|found| from + found)
}

#[cfg(test)]
mod tests;
