//! The audio routes' forms: finds `model` and `stream` without copying the file.
//!
//! A form is a sequence of parts between boundary lines; each part has a few header lines, an empty line, and
//! its bytes. `memmem` finds the boundary, so a file of 25 MiB costs one pass at memory speed. If a field is given
//! twice, the last one counts. The file counts as one media part of the prompt.
//!
//! Not a library: the established parsers (`multer`, which axum uses) are asynchronous and return values without their
//! byte positions, which renaming the model in place needs.
//!
//! Bounds: [`MAX_PARTS`] parts, [`MAX_PART_HEADERS`] bytes of headers in each; more is refused.
//! Not done: `multipart/mixed`, transfer encodings and `filename*`. No client of these routes uses them, and the engine
//! receives the form unchanged.

use std::borrow::Cow;

use memchr::memmem;

use super::request::RequestView;
use super::request_error::RequestError;
use super::rewrite::EditPoints;
use super::route::Route;
use super::scan::Span;
use super::shape::PromptSink;

/// Parts in a form. Transcription requests have about ten fields.
pub const MAX_PARTS: usize = 64;
/// Bytes of headers in one part.
pub const MAX_PART_HEADERS: usize = 8 << 10;
/// The longest boundary, characters (RFC 2046).
const MAX_BOUNDARY: usize = 70;

/// Reads the form in `body`; `content_type` is the request's header, which names the boundary.
///
/// # Errors
/// When there is no usable boundary, or the form is cut off or over a bound.
pub fn read<'a>(route: Route, content_type: &str, body: &'a [u8]) -> Result<RequestView<'a>, RequestError> {
    let boundary = boundary(content_type).ok_or(broken("the content type has no boundary"))?;
    let mut view = RequestView::empty(route);
    let mut model_span = None;
    parts(body, &boundary, |headers, span| {
        let Some((name, is_file)) = disposition(headers) else { return Ok(()) };
        let value = span.of(body);
        if is_file {
            view.shape.media();
            return Ok(());
        }
        match name {
            b"model" => {
                let text = std::str::from_utf8(value).map_err(|_| broken("'model' is not UTF-8"))?;
                view.model = (!text.is_empty()).then_some(Cow::Borrowed(text));
                model_span = Some(span);
            }
            b"stream" => {
                view.stream =
                    matches!(value.to_ascii_lowercase().as_slice(), b"true" | b"1" | b"on" | b"yes" | b"t" | b"y")
            }
            _ => {}
        }
        Ok(())
    })?;
    view.edits = EditPoints::form(model_span);
    Ok(view)
}

const fn broken(why: &'static str) -> RequestError {
    RequestError::NotAForm { why }
}

/// The line that separates the parts, with its dashes.
fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = parameters.split(';').find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim().trim_matches('"'))
    })?;
    (!value.is_empty() && value.len() <= MAX_BOUNDARY).then(|| format!("--{value}"))
}

/// Calls `part` with the headers and the span of each part.
fn parts(
    body: &[u8],
    boundary: &str,
    mut part: impl FnMut(&[u8], Span) -> Result<(), RequestError>,
) -> Result<(), RequestError> {
    let line = format!("\r\n{boundary}");
    let finder = memmem::Finder::new(&line);
    let mut at = if body.starts_with(boundary.as_bytes()) {
        boundary.len()
    } else {
        finder.find(body).ok_or(broken("its boundary does not occur"))? + line.len()
    };
    for _ in 0..MAX_PARTS {
        let rest = &body[at..];
        if rest.starts_with(b"--") {
            return Ok(());
        }
        let head = &rest[..rest.len().min(MAX_PART_HEADERS)];
        let headers = memmem::find(head, b"\r\n\r\n").ok_or(broken("a part has no end of headers"))?;
        let start = at + headers + 4;
        // The line break before the boundary may be the one that ended the headers (an empty part).
        let length = finder.find(&body[start - 2..]).ok_or(broken("its closing boundary is missing"))?;
        let end = (start - 2 + length).max(start);
        part(&rest[..headers], Span { start, end })?;
        at = start - 2 + length + line.len();
    }
    Err(broken("it has too many parts"))
}

/// The name of a part, and whether it is a file.
fn disposition(headers: &[u8]) -> Option<(&[u8], bool)> {
    headers.split(|byte| *byte == b'\n').find_map(|line| {
        let colon = memchr::memchr(b':', line)?;
        if !line[..colon].eq_ignore_ascii_case(b"content-disposition") {
            return None;
        }
        Some((parameter(line, b"name=")?, parameter(line, b"filename=").is_some()))
    })
}

fn parameter<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    line.split(|byte| *byte == b';').find_map(|part| {
        let value = part.trim_ascii().strip_prefix(name)?;
        Some(value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{EditedBody, Edits};
    use bytes::Bytes;

    const TYPE: &str = "multipart/form-data; charset=utf-8; boundary=\"XyZ\"";

    fn form(file: &[u8]) -> Vec<u8> {
        let head = "--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n\
                    --XyZ\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
        let tail = "\r\n--XyZ\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\nTrue\r\n\
                    --XyZ\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\n\r\n--XyZ--\r\n";
        [head.as_bytes(), file, tail.as_bytes()].concat()
    }

    #[test]
    fn model_stream_and_file_are_found() {
        let body = form(b"RIFF\r\n--Xy\r\n\r\n\x00\xff name=\"model\"");
        let view = read(Route::Transcriptions, TYPE, &body).unwrap();
        assert_eq!(view.model.as_deref(), Some("whisper"));
        assert!(view.stream);
        assert_eq!(view.shape.media_parts, 1);
    }

    #[test]
    fn the_model_can_be_renamed_in_place() {
        let body = Bytes::from(form(b"xyz"));
        let view = read(Route::Transcriptions, TYPE, &body).unwrap();
        let renamed = EditedBody::new(&body, &view.edits, Edits { model: Some("w2"), ..Edits::default() }).to_bytes();
        assert_eq!(read(Route::Transcriptions, TYPE, &renamed).unwrap().model.as_deref(), Some("w2"));
        assert_eq!(renamed.len(), body.len() - "whisper".len() + 2);
    }

    #[test]
    fn broken_forms_are_refused() {
        let body = form(b"xyz");
        let refused = |kind: &str, body: &[u8]| read(Route::Transcriptions, kind, body).is_err();
        assert!(refused("application/json", &body));
        assert!(refused("multipart/form-data", &body));
        assert!(refused("multipart/form-data; boundary=other", &body));
        assert!(refused(TYPE, b""));
        for end in 0..body.len() - 4 {
            assert!(refused(TYPE, &body[..end]), "{end}");
        }
        let part = "--XyZ\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n1\r\n";
        assert!(refused(TYPE, format!("{}--XyZ--", part.repeat(65)).as_bytes()));
        assert!(!refused(TYPE, format!("{}--XyZ--", part.repeat(63)).as_bytes()));
    }
}
