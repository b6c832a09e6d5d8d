//! Small changes to JSON text: values replaced, members removed so that the rest stays valid.
//!
//! Request bodies and events of streams are changed this way, so all other bytes stay as they were
//! written. The caller has found the spans with the scanner.

use smallvec::SmallVec;

use super::scan::Span;

/// Values and the spans that they replace; spans do not overlap. A value with an empty span is
/// inserted. Several values at one place are inserted in the order of the list.
pub type Patches = SmallVec<[(Span, String); 5]>;

/// A piece of the changed text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// These bytes of the original text.
    Same(Span),
    /// A new value.
    New(String),
}

/// The pieces of a text of `len` bytes after the changes; some may be empty.
pub(super) fn pieces(len: usize, mut patches: Patches) -> impl Iterator<Item = Piece> {
    patches.sort_by_key(|(span, _)| span.start);
    let rest = patches.iter().map(|(span, _)| span.end).max().unwrap_or(0);
    let mut at = 0;
    let changed = patches.into_iter().flat_map(move |(span, value)| {
        let before = Span { start: at, end: span.start };
        at = span.end;
        [Piece::Same(before), Piece::New(value)]
    });
    changed.chain([Piece::Same(Span { start: rest, end: len })])
}

/// The text after the changes.
pub fn applied(text: &[u8], patches: Patches) -> Vec<u8> {
    let more: usize = patches.iter().map(|(_, value)| value.len()).sum();
    let mut out = Vec::with_capacity(text.len() + more);
    for piece in pieces(text.len(), patches) {
        match piece {
            Piece::Same(span) => out.extend_from_slice(span.of(text)),
            Piece::New(value) => out.extend_from_slice(value.as_bytes()),
        }
    }
    out
}

/// The place of a member in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberSpan {
    /// Starts at the end of the member before, or after the brace if this is the first member. Ends
    /// at the end of the value.
    pub span: Span,
    /// Whether it is the first member.
    pub is_first: bool,
}

impl MemberSpan {
    /// The bytes to remove so that the rest is valid: the member with the comma before it, or with
    /// the comma after it if it is the first member.
    pub fn removal(self, text: &[u8]) -> Span {
        let after = &text[self.span.end..];
        let blanks = after.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        match self.is_first && after.get(blanks) == Some(&b',') {
            true => Span { end: self.span.end + blanks + 1, ..self.span },
            false => self.span,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patches(list: &[(usize, usize, &str)]) -> Patches {
        list.iter().map(|(start, end, value)| (Span { start: *start, end: *end }, (*value).to_owned())).collect()
    }

    #[test]
    fn values_replace_spans_in_any_order() {
        assert_eq!(applied(b"0123456", patches(&[(5, 6, "E"), (1, 3, "AB"), (3, 3, "-"), (3, 4, "")])), b"0AB-4E6");
        assert_eq!(applied(b"01", patches(&[])), b"01");
        assert_eq!(applied(b"01", patches(&[(2, 2, "x"), (2, 2, "y"), (0, 2, "")])), b"xy");
    }

    #[test]
    fn a_member_goes_with_one_comma() {
        for (text, start, end, is_first, left) in [
            ("{\"a\":1 , \"b\":2}", 1, 6, true, "{ \"b\":2}"),
            ("{\"a\":1,\"b\":2}", 6, 12, false, "{\"a\":1}"),
            ("{ \"a\":1 }", 1, 7, true, "{ }"),
        ] {
            let span = MemberSpan { span: Span { start, end }, is_first }.removal(text.as_bytes());
            assert_eq!(applied(text.as_bytes(), patches(&[(span.start, span.end, "")])), left.as_bytes());
        }
    }
}
