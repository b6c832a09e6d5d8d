//! A pull scanner over raw JSON: finds values without building a tree and without allocating.
//!
//! A body of up to 32 MiB has only a dozen small fields that the gateway needs, and long strings
//! are skipped at memory speed: inside a string only `"` and `\` matter, and `memchr2` searches 16
//! or 32 bytes at a time. The caller asks for the kind of the next value, then enters it
//! ([`Scanner::object`], [`Scanner::array`]), takes it ([`Scanner::text`], [`Scanner::number`]) or
//! skips it ([`Scanner::skip`]).
//!
//! Checked: structure, numbers, escapes, literals, nesting (at most [`MAX_DEPTH`]), nothing after
//! the end. Accepted although JSON forbids it: raw control characters inside strings (the engine
//! refuses them), and, as in Python, `NaN`, `Infinity`, `-Infinity` and a byte order mark at the
//! start. The caller checks UTF-8 once, over the whole body; decoding replaces invalid bytes.

mod string;
mod value;

use memchr::memchr2;

use string::closing_quote;
pub use value::{JsonKind, MAX_DEPTH, ScanError, Span, Text};

/// Number of words with one bit for each open container.
const DEPTH_WORDS: usize = MAX_DEPTH as usize / 64 + 1;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// In a string of up to this many bytes, all escapes are checked. Only such strings are ever
/// decoded.
const CHECKED_TEXT: usize = 4 << 10;

/// Words of eight bytes that are examined before a vector search starts.
const NEAR_WORDS: usize = 3;

/// Times a byte: a word of eight such bytes.
const REPEATED: u64 = 0x0101_0101_0101_0101;
const QUOTES: u64 = REPEATED * b'"' as u64;
const BACKSLASHES: u64 = REPEATED * b'\\' as u64;

/// A position in a JSON document.
///
/// Keys and strings come as [`Text`], still escaped; [`Text::bytes`] decodes, so that
/// `"mod\u0065l"` is the key `model` here as in the engine. Duplicate keys are all reported, in
/// order: a caller that keeps the last one agrees with Python's `json`.
#[derive(Clone, Debug)]
pub struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: u32,
}

impl<'a> Scanner<'a> {
    /// Starts at the first byte of `bytes`, or after the byte order mark if there is one.
    pub fn new(bytes: &'a [u8]) -> Self {
        let at = if bytes.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
        Self { bytes, at, depth: 0 }
    }

    /// Number of open containers.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Offset of the next byte that was not consumed.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Skips blanks and returns the kind of the next value, without consuming it.
    pub fn kind(&mut self) -> Result<JsonKind, ScanError> {
        Ok(match self.peek()? {
            b'"' => JsonKind::String,
            b'{' => JsonKind::Object,
            b'[' => JsonKind::Array,
            b'-' | b'0'..=b'9' | b'N' | b'I' => JsonKind::Number,
            b't' | b'f' => JsonKind::Bool,
            b'n' => JsonKind::Null,
            _ => return Err(self.broken("a value")),
        })
    }

    /// Enters an object and calls `member` for each key; `member` must consume exactly the value.
    /// Returns the span of the object.
    pub fn object<E: From<ScanError>>(
        &mut self,
        mut member: impl FnMut(&mut Self, Text<'a>) -> Result<(), E>,
    ) -> Result<Span, E> {
        let start = self.open(b'{', "'{'")?;
        if self.peek()? == b'}' {
            return Ok(self.close(start));
        }
        loop {
            let key = self.key()?;
            member(self, key)?;
            match self.peek()? {
                b',' => self.at += 1,
                b'}' => return Ok(self.close(start)),
                _ => return Err(self.broken("',' or '}'").into()),
            }
        }
    }

    /// Enters an array and calls `element` for each element, which `element` must consume. Returns
    /// the span of the array.
    pub fn array<E: From<ScanError>>(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<Span, E> {
        let start = self.open(b'[', "'['")?;
        if self.peek()? == b']' {
            return Ok(self.close(start));
        }
        loop {
            element(self)?;
            match self.peek()? {
                b',' => self.at += 1,
                b']' => return Ok(self.close(start)),
                _ => return Err(self.broken("',' or ']'").into()),
            }
        }
    }

    /// Takes a string.
    pub fn text(&mut self) -> Result<Text<'a>, ScanError> {
        if self.peek()? != b'"' {
            return Err(self.broken("a string"));
        }
        let start = self.at + 1;
        let mut at = start;
        let mut escaped = false;
        loop {
            if at - start > CHECKED_TEXT {
                return self.long_text(start, at, escaped);
            }
            at = self.quote_or_escape(at).ok_or(ScanError::Truncated { at: self.bytes.len() })?;
            if self.bytes[at] == b'"' {
                self.at = at + 1;
                return Ok(Text { raw: &self.bytes[start..at], escaped });
            }
            escaped = true;
            // In non-Latin text as Python writes it, one escape follows the other, and a new memchr
            // for each would be slow.
            while self.bytes.get(at) == Some(&b'\\') && at - start <= CHECKED_TEXT {
                at = self.escape(at)?;
            }
        }
    }

    /// Takes the rest of a long string from `from`, which is not inside an escape. `escaped`:
    /// whether escapes precede it. The escapes in the rest are not checked here, because stepping
    /// over each escape in 400 KB of code takes half a millisecond.
    fn long_text(&mut self, start: usize, from: usize, mut escaped: bool) -> Result<Text<'a>, ScanError> {
        let quote = closing_quote(&self.bytes[from..]).ok_or(ScanError::Truncated { at: self.bytes.len() })?;
        escaped |= quote.behind_escapes;
        let raw = &self.bytes[start..from + quote.at];
        self.at = from + quote.at + 1;
        Ok(Text { raw, escaped })
    }

    /// Takes a number and returns the characters.
    pub fn number(&mut self) -> Result<&'a [u8], ScanError> {
        self.peek()?;
        let start = self.at;
        if self.at_byte() == Some(b'-') {
            self.at += 1;
        }
        match self.at_byte() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits()?,
            Some(b'N') if self.at == start => self.literal(b"NaN", "a number")?,
            Some(b'I') => self.literal(b"Infinity", "a number")?,
            Some(_) => return Err(self.broken("a digit")),
            None => return Err(ScanError::Truncated { at: self.at }),
        }
        if self.at_byte() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.at_byte(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.at_byte(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(&self.bytes[start..self.at])
    }

    /// Takes `true` or `false`.
    pub fn boolean(&mut self) -> Result<bool, ScanError> {
        if self.peek()? == b't' {
            return self.literal(b"true", "true").map(|()| true);
        }
        self.literal(b"false", "true or false").map(|()| false)
    }

    /// Consumes the next value of any kind and returns its span.
    pub fn skip(&mut self) -> Result<Span, ScanError> {
        let kind = self.kind()?;
        let start = self.at;
        match kind {
            JsonKind::Object | JsonKind::Array => self.skip_containers()?,
            kind => self.skip_scalar(kind)?,
        }
        Ok(Span { start, end: self.at })
    }

    fn skip_scalar(&mut self, kind: JsonKind) -> Result<(), ScanError> {
        match kind {
            JsonKind::String => self.text().map(drop),
            JsonKind::Number => self.number().map(drop),
            JsonKind::Bool => self.boolean().map(drop),
            JsonKind::Null => self.literal(b"null", "null"),
            JsonKind::Object | JsonKind::Array => Err(self.broken("a scalar")),
        }
    }

    /// Steps over a container and its content, without recursion, since a client chooses the depth.
    fn skip_containers(&mut self) -> Result<(), ScanError> {
        let floor = self.depth;
        // A bit for each open container: whether it is an object.
        let mut objects = [0u64; DEPTH_WORDS];
        loop {
            match self.kind()? {
                kind @ (JsonKind::Object | JsonKind::Array) => {
                    let is_object = kind == JsonKind::Object;
                    self.open(if is_object { b'{' } else { b'[' }, "a container")?;
                    let (word, bit) = bit_of(self.depth);
                    objects[word] = objects[word] & !bit | if is_object { bit } else { 0 };
                    let close = if is_object { b'}' } else { b']' };
                    if self.peek()? != close {
                        if is_object {
                            self.key()?;
                        }
                        continue;
                    }
                    self.close(self.at);
                }
                kind => self.skip_scalar(kind)?,
            }
            // After a value, containers are closed until another value follows.
            loop {
                if self.depth == floor {
                    return Ok(());
                }
                let (word, bit) = bit_of(self.depth);
                let is_object = objects[word] & bit != 0;
                match self.peek()? {
                    b',' => {
                        self.at += 1;
                        if is_object {
                            self.key()?;
                        }
                        break;
                    }
                    b'}' if is_object => drop(self.close(self.at)),
                    b']' if !is_object => drop(self.close(self.at)),
                    _ if is_object => return Err(self.broken("',' or '}'")),
                    _ => return Err(self.broken("',' or ']'")),
                }
            }
        }
    }

    /// Consumes the next value and returns its bytes.
    pub fn skip_raw(&mut self) -> Result<&'a [u8], ScanError> {
        let span = self.skip()?;
        Ok(&self.bytes[span.start..span.end])
    }

    /// Consumes an array of integers and returns their number; a fast loop for prompts of token ids
    /// (100,000 ids are 600 KB). If it holds other values, returns `Ok(None)` and consumes nothing.
    pub fn integers(&mut self) -> Result<Option<u64>, ScanError> {
        if self.peek()? != b'[' {
            return Ok(None);
        }
        let rest = &self.bytes[self.at..];
        let Some(end) = memchr::memchr(b']', rest) else {
            // The caller's general path then reports the error.
            return Ok(None);
        };
        // `before` starts with the bracket, so that every digit has a byte before it.
        let (before, list) = (&rest[..end - 1], &rest[1..end]);
        let mut count = 0u64;
        for (before, list) in before.chunks(255).zip(list.chunks(255)) {
            let (mut starts, mut known) = (0u8, 0u8);
            for (before, byte) in before.iter().zip(list) {
                starts += u8::from(byte.is_ascii_digit() & !before.is_ascii_digit());
                // No branches, so that the compiler can vectorise the loop.
                let blank = (*byte == b' ') | (*byte == b'\n') | (*byte == b'\r') | (*byte == b'\t');
                known += u8::from(byte.is_ascii_digit() | (*byte == b',') | blank);
            }
            if usize::from(known) != list.len() {
                return Ok(None);
            }
            count += u64::from(starts);
        }
        self.at += end + 1;
        Ok(Some(count))
    }

    /// Checks that nothing but blanks is left.
    pub fn end(&mut self) -> Result<(), ScanError> {
        self.blanks();
        if self.at < self.bytes.len() {
            return Err(ScanError::Trailing { at: self.at });
        }
        Ok(())
    }

    /// Takes a key and the colon.
    fn key(&mut self) -> Result<Text<'a>, ScanError> {
        if self.peek()? != b'"' {
            return Err(self.broken("a key in quotes"));
        }
        let key = self.text()?;
        if self.peek()? != b':' {
            return Err(self.broken("':'"));
        }
        self.at += 1;
        Ok(key)
    }

    fn open(&mut self, bracket: u8, expected: &'static str) -> Result<usize, ScanError> {
        if self.peek()? != bracket {
            return Err(self.broken(expected));
        }
        if self.depth == MAX_DEPTH {
            return Err(ScanError::TooDeep { at: self.at });
        }
        self.depth += 1;
        self.at += 1;
        Ok(self.at - 1)
    }

    fn close(&mut self, start: usize) -> Span {
        self.depth -= 1;
        self.at += 1;
        Span { start, end: self.at }
    }

    /// The position of the next `"` or `\\`. Keys are short and code is full of escapes, so a few
    /// words are examined before `memchr2`.
    fn quote_or_escape(&self, at: usize) -> Option<usize> {
        let (words, _) = self.bytes.get(at..)?.as_chunks();
        for (index, word) in words.iter().take(NEAR_WORDS).enumerate() {
            let word = u64::from_le_bytes(*word);
            let found = zeros(word ^ QUOTES) | zeros(word ^ BACKSLASHES);
            if found != 0 {
                return Some(at + index * size_of::<u64>() + found.trailing_zeros() as usize / 8);
            }
        }
        let from = at + words.len().min(NEAR_WORDS) * size_of::<u64>();
        Some(from + memchr2(b'"', b'\\', &self.bytes[from..])?)
    }

    /// Returns the offset after the escape whose backslash is at `at`.
    fn escape(&self, at: usize) -> Result<usize, ScanError> {
        let expected = "a valid escape after '\\'";
        match self.bytes.get(at + 1) {
            None => Err(ScanError::Truncated { at: self.bytes.len() }),
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
            Some(b'u') => match self.bytes.get(at + 2..at + 6) {
                None => Err(ScanError::Truncated { at: self.bytes.len() }),
                Some(hex) if hex.iter().all(u8::is_ascii_hexdigit) => Ok(at + 6),
                Some(_) => Err(ScanError::Broken { at, expected }),
            },
            Some(_) => Err(ScanError::Broken { at, expected }),
        }
    }

    fn digits(&mut self) -> Result<(), ScanError> {
        let rest = &self.bytes[self.at..];
        let count = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
        self.at += count;
        match (count, self.at_byte()) {
            (0, None) => Err(ScanError::Truncated { at: self.at }),
            (0, Some(_)) => Err(self.broken("a digit")),
            _ => Ok(()),
        }
    }

    fn literal(&mut self, word: &'static [u8], expected: &'static str) -> Result<(), ScanError> {
        let rest = &self.bytes[self.at..];
        if rest.starts_with(word) {
            self.at += word.len();
            return Ok(());
        }
        if word.starts_with(rest) {
            return Err(ScanError::Truncated { at: self.bytes.len() });
        }
        Err(self.broken(expected))
    }

    fn blanks(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.bytes.get(self.at) {
            self.at += 1;
        }
    }

    fn peek(&mut self) -> Result<u8, ScanError> {
        self.blanks();
        self.at_byte().ok_or(ScanError::Truncated { at: self.at })
    }

    fn at_byte(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn broken(&self, expected: &'static str) -> ScanError {
        ScanError::Broken { at: self.at, expected }
    }
}

/// Marks the highest bit of each zero byte. Bytes above the first zero byte may be marked, too.
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(REPEATED) & !word & (REPEATED << 7)
}

/// Word and bit of the container at `depth`.
fn bit_of(depth: u32) -> (usize, u64) {
    (depth as usize / 64, 1 << (depth % 64))
}

#[cfg(test)]
mod tests;
