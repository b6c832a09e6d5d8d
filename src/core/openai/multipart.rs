//! The forms of the audio routes: finds `model` and the bounds of the output, without copying the
//! file.
//!
//! The gateway checks a key's right to the form's `model`; then the engine reads the form with
//! another parser. Parsers agree about forms as usual clients write them, and differ about all
//! others: with a parameter in upper case, a second name, a boundary inside a field, or a `charset`
//! in which the name reads differently. So [`read`] accepts only a canonical spelling, which every
//! parser reads alike. `python-multipart`, which vLLM uses, and `multer`, which axum uses, accept
//! more and differ from each other; tests compare this reader with both. The form goes upstream
//! unchanged, except for the value of `model`.
//!
//! Bounds: [`MAX_PARTS`] parts, [`MAX_PART_HEADERS`] bytes of headers in each. `memmem` finds the
//! boundary, so a file of 25 MiB costs one pass at memory speed.

use std::borrow::Cow;

use memchr::memmem;
use smallvec::SmallVec;

use super::prompt;
use super::request::{self, RequestView};
use super::request_error::RequestError;
use super::rewrite::EditPoints;
use super::route::Route;
use super::scan::Span;
use super::shape::PromptSink;

/// Largest number of parts in a form. Transcription requests have about ten fields.
pub const MAX_PARTS: usize = 64;
/// Largest size of the headers of one part, bytes.
pub const MAX_PART_HEADERS: usize = 4 << 10;
/// The longest boundary, characters (RFC 2046).
const MAX_BOUNDARY: usize = 70;
/// Bytes that a boundary may have besides letters and digits (RFC 2046, without the blank and the
/// comma).
const BOUNDARY_MARKS: &[u8] = b"'()+_-./:=?";
/// Bytes that a value outside quotes may have besides letters and digits.
const VALUE_MARKS: &[u8] = b"!#$%&'*+-.^_`|~/:=?()";
/// Bytes that the name of a part may have besides letters and digits.
const NAME_MARKS: &[u8] = b"_.-[]";
/// Character sets in which ASCII bytes mean ASCII.
const CHARSETS: [&[u8]; 3] = [b"utf-8", b"us-ascii", b"iso-8859-1"];

/// Reads the form in `body`. `content_type` is the request's only `Content-Type`, which names the
/// boundary. The canonical spelling:
///
/// - the boundary occurs only between parts, each time on a separate line; nothing precedes the
///   first or follows the last;
/// - every part has one `Content-Disposition: form-data` with one `name` and at most one
///   `filename`, both in lower case, as tokens or in quotes without escapes; header lines are not
///   folded and hold no control characters;
/// - names consist of letters, digits and `_ . - [ ]`; each occurs once, except lists (`name[]`),
///   and `model` is a field;
/// - character sets are UTF-8 or a subset, and contents are not encoded.
///
/// The file counts as one media part of the prompt, and a long field as text, since the model reads
/// `prompt`.
///
/// # Errors
/// If the form is not in the canonical spelling, or is over a bound.
pub fn read<'a>(route: Route, content_type: &str, body: &'a [u8]) -> Result<RequestView<'a>, RequestError> {
    let delimiter = [b"--", boundary(content_type.as_bytes())?].concat();
    let mut view = RequestView::empty(route);
    let mut names: SmallVec<[&[u8]; 16]> = SmallVec::new();
    let mut model_span = None;
    let open = parts(body, &delimiter, |span| {
        let part = Part::read(span, body)?;
        if !part.name.ends_with(b"[]") && names.iter().any(|name| name.eq_ignore_ascii_case(part.name)) {
            return Err(refused("a field is given twice"));
        }
        names.push(part.name);
        if part.is_file {
            view.shape.media();
        }
        field(&part, body, &mut view, &mut model_span)
    })?;
    view.edits = EditPoints::form(model_span, Span { start: open, end: open + delimiter.len() });
    Ok(view)
}

fn field<'a>(
    part: &Part<'a>,
    body: &'a [u8],
    view: &mut RequestView<'a>,
    model_span: &mut Option<Span>,
) -> Result<(), RequestError> {
    let value = part.content.of(body);
    match part.name {
        b"model" if part.is_file || !part.is_plain => {
            return Err(refused("'model' is not a plain field"));
        }
        b"model" => {
            let text = std::str::from_utf8(value).map_err(|_| refused("'model' is not UTF-8"))?;
            if text.chars().any(char::is_control) {
                return Err(refused("'model' has control characters"));
            }
            view.model = (!text.is_empty()).then_some(Cow::Borrowed(text));
            *model_span = Some(part.content);
        }
        name if name.eq_ignore_ascii_case(b"model") => return Err(refused("'model' is not in lower case")),
        // A field `_charset_` changes how parsers decode other fields (RFC 7578, 4.6).
        b"_charset_" => return Err(refused("it has a field '_charset_'")),
        b"stream" => view.stream = request::truth(value).unwrap_or(false),
        b"n" => view.n = number(value).map_or(1, |n| n.clamp(1, request::MAX_SEQUENCES.into()) as u32),
        b"max_completion_tokens" => view.max_output = number(value),
        // A file is no prompt text. Other fields may be, because the model reads `prompt` and
        // perhaps more.
        _ if part.is_file => {}
        name => prompt::other_field(name, value, &mut view.shape),
    }
    Ok(())
}

/// The number in a field. `None` for any other value, which the engine refuses.
fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value.trim_ascii()).ok()?.parse().ok()
}

const fn refused(why: &'static str) -> RequestError {
    RequestError::NotAForm { why }
}

/// Calls `part` with the span of each part, headers included. Returns the offset of the first
/// delimiter.
fn parts(
    body: &[u8],
    delimiter: &[u8],
    mut part: impl FnMut(Span) -> Result<(), RequestError>,
) -> Result<usize, RequestError> {
    let finder = memmem::Finder::new(delimiter);
    let open = if body.starts_with(b"\r\n") { 2 } else { 0 };
    if !body[open..].starts_with(delimiter) {
        return Err(refused("it does not begin with its boundary"));
    }
    let mut behind = open + delimiter.len();
    for _ in 0..=MAX_PARTS {
        let rest = &body[behind..];
        if let Some(end) = rest.strip_prefix(b"--") {
            return if end.trim_ascii().is_empty() { Ok(open) } else { Err(refused("it goes on after its end")) };
        }
        if !rest.starts_with(b"\r\n") {
            return Err(refused("a boundary is not on a line of its own"));
        }
        let start = behind + 2;
        let next = start + finder.find(&body[start..]).ok_or(refused("its closing boundary is missing"))?;
        if !body[start..next].ends_with(b"\r\n") {
            return Err(refused("its boundary occurs inside a part"));
        }
        part(Span { start, end: next - 2 })?;
        behind = next + delimiter.len();
    }
    Err(refused("it has more than 64 parts"))
}

struct Part<'a> {
    name: &'a [u8],
    is_file: bool,
    /// Whether the part has no content type, or is plain text in a character set of [`CHARSETS`].
    is_plain: bool,
    content: Span,
}

impl<'a> Part<'a> {
    fn read(span: Span, body: &'a [u8]) -> Result<Self, RequestError> {
        let bytes = span.of(body);
        let near = &bytes[..bytes.len().min(MAX_PART_HEADERS)];
        let end =
            memmem::find(near, b"\r\n\r\n").ok_or(refused("the headers of a part have no end or are too long"))?;
        let (mut disposition, mut content_type) = (None, None);
        for line in Lines(&bytes[..end]) {
            let (name, value) = header(line)?;
            if name.eq_ignore_ascii_case(b"content-disposition") {
                once(&mut disposition, value, "a part has two Content-Dispositions")?;
            } else if name.eq_ignore_ascii_case(b"content-type") {
                once(&mut content_type, value, "a part has two Content-Types")?;
            } else if name.eq_ignore_ascii_case(b"content-transfer-encoding")
                && ![&b"7bit"[..], b"8bit", b"binary"].iter().any(|plain| value.eq_ignore_ascii_case(plain))
            {
                return Err(refused("the content of a part is encoded"));
            }
        }
        let (name, is_file) = names(disposition.ok_or(refused("a part has no Content-Disposition"))?)?;
        let content = Span { start: span.start + end + 4, end: span.end };
        Ok(Self { name, is_file, is_plain: content_type.is_none_or(is_plain_text), content })
    }
}

struct Lines<'a>(&'a [u8]);

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let end = memmem::find(self.0, b"\r\n");
        let line = &self.0[..end.unwrap_or(self.0.len())];
        self.0 = end.map_or(&[], |end| &self.0[end + 2..]);
        Some(line)
    }
}

fn header(line: &[u8]) -> Result<(&[u8], &[u8]), RequestError> {
    if line.iter().any(u8::is_ascii_control) {
        return Err(refused("a part's header has control characters"));
    }
    let colon = memchr::memchr(b':', line).ok_or(refused("a part's header has no colon"))?;
    let name = &line[..colon];
    if name.is_empty() || !name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-') {
        return Err(refused("a part's header has a malformed name"));
    }
    Ok((name, line[colon + 1..].trim_ascii()))
}

fn once<'a>(slot: &mut Option<&'a [u8]>, value: &'a [u8], twice: &'static str) -> Result<(), RequestError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(refused(twice)),
    }
}

fn names(disposition: &[u8]) -> Result<(&[u8], bool), RequestError> {
    let (mut name, mut filename, mut extended) = (None, None, None);
    parameters(disposition, b"form-data", |key, value| match key {
        b"name" => once(&mut name, value, "a part has two names"),
        b"filename" => once(&mut filename, value, "a part has two file names"),
        b"filename*" => once(&mut extended, value, "a part has two file names"),
        _ => Err(refused("a Content-Disposition has a parameter other than 'name' and 'filename'")),
    })?;
    let name = name.ok_or(refused("a part has no name"))?;
    if name.is_empty() || !name.iter().all(|byte| byte.is_ascii_alphanumeric() || NAME_MARKS.contains(byte)) {
        return Err(refused("the name of a part has characters other than letters, digits and _.-[]"));
    }
    // Some parsers ignore `filename*`, and would read the part as a field.
    if extended.is_some() && filename.is_none() {
        return Err(refused("a part has 'filename*' without 'filename'"));
    }
    Ok((name, filename.is_some()))
}

fn boundary(content_type: &[u8]) -> Result<&[u8], RequestError> {
    let (mut boundary, mut charset) = (None, None);
    parameters(content_type, b"multipart/form-data", |key, value| match key {
        b"boundary" => once(&mut boundary, value, "the content type has two boundaries"),
        b"charset" => once(&mut charset, value, "the content type has two character sets"),
        _ => Err(refused("the content type has a parameter other than 'boundary'")),
    })?;
    if charset.is_some_and(|charset| !charset.eq_ignore_ascii_case(CHARSETS[0])) {
        return Err(refused("the content type has a character set other than utf-8"));
    }
    let usable = |value: &&[u8]| {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || BOUNDARY_MARKS.contains(byte);
        (1..=MAX_BOUNDARY).contains(&value.len()) && value.iter().all(plain)
    };
    boundary
        .filter(usable)
        .ok_or(refused("the content type has no boundary of 1 to 70 letters, digits and '()+_-./:=?"))
}

/// Whether a part's content type is plain text in which ASCII means ASCII.
fn is_plain_text(value: &[u8]) -> bool {
    let known = |charset: &[u8]| CHARSETS.iter().any(|known| known.eq_ignore_ascii_case(charset));
    let mut plain = true;
    let read = parameters(value, b"text/plain", |key, value| {
        plain &= key == b"charset" && known(value);
        Ok(())
    });
    read.is_ok() && plain
}

/// Calls `parameter` with each `key=value` after `kind` in a header's value.
fn parameters<'a>(
    value: &'a [u8],
    kind: &[u8],
    mut parameter: impl FnMut(&[u8], &'a [u8]) -> Result<(), RequestError>,
) -> Result<(), RequestError> {
    let malformed = refused("a parameter of a header is not written as ; key=\"value\"");
    let kind_fits = value.split_at_checked(kind.len()).filter(|(start, _)| start.eq_ignore_ascii_case(kind));
    let (_, mut rest) = kind_fits.ok_or(refused("it is not multipart/form-data"))?;
    loop {
        rest = rest.trim_ascii_start();
        if rest.is_empty() {
            return Ok(());
        }
        rest = rest.strip_prefix(b";").ok_or(malformed.clone())?.trim_ascii_start();
        let equals = memchr::memchr(b'=', rest).ok_or(malformed.clone())?;
        let key = &rest[..equals];
        if !key.iter().all(|byte| byte.is_ascii_lowercase() || *byte == b'*') {
            return Err(malformed);
        }
        rest = &rest[equals + 1..];
        let value = match rest.strip_prefix(b"\"") {
            Some(quoted) => {
                let end = memchr::memchr(b'"', quoted).ok_or(malformed.clone())?;
                rest = &quoted[end + 1..];
                &quoted[..end]
            }
            None => {
                let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || VALUE_MARKS.contains(byte);
                let end = rest.iter().position(|byte| !is_plain(byte)).unwrap_or(rest.len());
                let (value, behind) = rest.split_at(end);
                rest = behind;
                value
            }
        };
        if value.is_empty() && key != b"filename" || value.contains(&b'\\') {
            return Err(malformed);
        }
        parameter(key, value)?;
    }
}

#[cfg(test)]
mod tests;
