//! The results of the scanner: kinds of values, positions, strings that are still escaped, errors.
//!
//! Other modules pass these values on, so they are in a separate file.

use std::borrow::Cow;

use super::string::unescape;

/// The deepest accepted nesting; Python's parser also stops after 1,000 nested calls. Requests of
/// real clients stay below 20 (tool schemas). [`Scanner::skip`] does not recurse.
pub const MAX_DEPTH: u32 = 1_000;

/// Why bytes are not an acceptable JSON document; the sender is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// The input ends inside a value.
    #[error("the JSON ends in the middle of a value at byte {at}; send the whole document")]
    Truncated {
        /// Offset of the end.
        at: usize,
    },
    /// A byte does not fit the syntax.
    #[error("the JSON is broken at byte {at}: expected {expected}")]
    Broken {
        /// Offset of the first byte that does not fit.
        at: usize,
        /// The syntax that would fit.
        expected: &'static str,
    },
    /// Nesting of more than [`MAX_DEPTH`] containers.
    #[error("the JSON nests deeper than {MAX_DEPTH} levels at byte {at}; flatten it")]
    TooDeep {
        /// Offset of the first container that is too deep.
        at: usize,
    },
    /// Bytes after the document.
    #[error("the JSON goes on after its end at byte {at}; send one document")]
    Trailing {
        /// Offset of the first byte after the end that is not blank.
        at: usize,
    },
}

/// The position of a value in its input: bytes `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first byte.
    pub start: usize,
    /// Offset after the last byte.
    pub end: usize,
}

impl Span {
    /// The bytes of `input` that the span covers.
    pub fn of(self, input: &[u8]) -> &[u8] {
        &input[self.start..self.end]
    }

    /// Whether the span covers no byte.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

labels! {
    /// The kind of the next value, judged by its first byte.
    pub enum JsonKind {
        /// `{`
        Object = "an object",
        /// `[`
        Array = "a list",
        /// `"`
        String = "a string",
        /// A digit or `-` (and `N`, `I`: Python's notation for numbers that JSON does not have)
        Number = "a number",
        /// `true` or `false`
        Bool = "a boolean",
        /// `null`
        Null = "null",
    }
}

/// A string of the input without quotes, not decoded.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// The bytes between the quotes.
    pub raw: &'a [u8],
    /// Whether `raw` holds an escape.
    pub escaped: bool,
}

impl<'a> Text<'a> {
    /// The decoded bytes; borrowed if nothing is escaped.
    pub fn bytes(self) -> Cow<'a, [u8]> {
        if !self.escaped {
            return Cow::Borrowed(self.raw);
        }
        Cow::Owned(unescape(self.raw).into_bytes())
    }

    /// The decoded text; borrowed if nothing is escaped. Invalid UTF-8 and lone surrogates become
    /// U+FFFD.
    pub fn decode(self) -> Cow<'a, str> {
        if !self.escaped {
            return String::from_utf8_lossy(self.raw);
        }
        Cow::Owned(unescape(self.raw))
    }
}
