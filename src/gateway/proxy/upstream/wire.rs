//! Parses HTTP/1.1 responses: the head, and the framing of the body.
//!
//! Pure functions of bytes. Why not pingora's session: it keeps a 64 KiB buffer for every open
//! response, of which there may be 5,000, and sends head and body of a request in separate writes.
//!
//! Framing (RFC 9112, 6.3): 1xx, 204 and 304 have no body. Otherwise the body is `chunked`, or has
//! a `Content-Length`, or ends with the connection. A response with both, with different lengths or
//! with an unknown coding is an error, because the end is ambiguous. Bounds: [`HEAD_MAX`],
//! [`HEADERS_MAX`], [`LINE_MAX`], [`TRAILER_MAX`].

use std::mem::MaybeUninit;

use bytes::{Buf, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, StatusCode};

/// The most bytes of a response's head.
pub(in crate::proxy) const HEAD_MAX: usize = 64 << 10;
/// The most header lines of a response.
const HEADERS_MAX: usize = 128;
/// The most bytes of a chunk's size line.
const LINE_MAX: usize = 1_024;
/// The most bytes of trailers, which are dropped.
const TRAILER_MAX: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::proxy) enum WireError {
    #[error("the head is not HTTP/1: {0}")]
    NotHttp(httparse::Error),
    #[error("the head is larger than {HEAD_MAX} bytes")]
    HeadTooLarge,
    #[error("the body's framing is ambiguous")]
    Framing,
    #[error("a chunk has no readable size")]
    ChunkSize,
    #[error("a chunk does not end where it should")]
    ChunkEnd,
    #[error("the trailers are larger than {TRAILER_MAX} bytes")]
    TrailersTooLarge,
    #[error("the body is not valid gzip")]
    Gzip,
}

#[derive(Debug)]
pub(in crate::proxy) struct ParsedHead {
    pub(in crate::proxy) status: StatusCode,
    pub(in crate::proxy) headers: HeaderMap,
    pub(super) framing: Framing,
    pub(super) keepalive: bool,
}

/// Removes a head at the front of `input` and parses it; `None`: it is incomplete.
pub(in crate::proxy) fn take_head(input: &mut BytesMut) -> Result<Option<ParsedHead>, WireError> {
    // The lines are not initialized, because that would write 4 KB for each head.
    let mut lines = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut parsed, input, &mut lines) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if input.len() > HEAD_MAX => return Err(WireError::HeadTooLarge),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(WireError::HeadTooLarge),
        Err(error) => return Err(WireError::NotHttp(error)),
    };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(WireError::NotHttp(httparse::Error::Status))?;
    let first_version = parsed.version == Some(0);
    // Room for headers that are added for the client. Values are copied, because slices would keep
    // the whole read buffer alive until the response ends.
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 6);
    for line in parsed.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(line.value)) {
            headers.append(name, value);
        }
    }
    input.advance(length);
    let framing = Framing::of(status, &headers)?;
    let keepalive = keeps_alive(first_version, &headers) && framing != Framing::UntilClose;
    Ok(Some(ParsedHead { status, headers, framing, keepalive }))
}

fn keeps_alive(first_version: bool, headers: &HeaderMap) -> bool {
    let says = |token: &str| {
        let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case(token))
    };
    if first_version { says("keep-alive") } else { !says("close") }
}

/// How a body is framed, and how far it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Framing {
    /// This many bytes are left.
    Length(u64),
    /// Chunks, and the position in them.
    Chunked(Chunk),
    /// The body ends when the connection closes.
    UntilClose,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Chunk {
    /// At the size line of a chunk.
    Size,
    /// Inside a chunk: this many bytes are left.
    Bytes(u64),
    /// At the line end after a chunk.
    End,
    /// In the trailers, of which this many bytes were dropped.
    Trailers(usize),
}

impl Framing {
    fn of(status: StatusCode, headers: &HeaderMap) -> Result<Self, WireError> {
        let bodyless = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        if status.is_informational() || bodyless {
            return Ok(Self::Done);
        }
        let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
        let length = lengths.next();
        if lengths.any(|other| Some(other) != length) {
            return Err(WireError::Framing);
        }
        let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
        match (codings.next(), length) {
            (Some(coding), None) if codings.next().is_none() && coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
                Ok(Self::Chunked(Chunk::Size))
            }
            (None, Some(length)) => {
                let digits = length.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                let length = digits.and_then(|text| text.parse().ok()).ok_or(WireError::Framing)?;
                Ok(if length == 0 { Self::Done } else { Self::Length(length) })
            }
            (None, None) => Ok(Self::UntilClose),
            _ => Err(WireError::Framing),
        }
    }

    /// Moves the body from `input` to `out` until more input is needed or the body ends
    /// ([`Framing::Done`]). Bytes after the body stay in `input`.
    pub(super) fn decode(&mut self, input: &mut BytesMut, out: &mut BytesMut) -> Result<(), WireError> {
        // Reserves once for all chunks of a read. Otherwise each chunk would grow the buffer.
        if *self != Self::Done {
            out.reserve(input.len());
        }
        let mut rest = &input[..];
        let decoded = self.decode_slice(&mut rest, out);
        let taken = input.len() - rest.len();
        input.advance(taken);
        decoded
    }

    fn decode_slice(&mut self, input: &mut &[u8], out: &mut BytesMut) -> Result<(), WireError> {
        loop {
            match self {
                Self::Done => return Ok(()),
                Self::UntilClose => {
                    pass(input, out, u64::MAX);
                    return Ok(());
                }
                Self::Length(left) => {
                    *left -= pass(input, out, *left);
                    if *left > 0 {
                        return Ok(());
                    }
                    *self = Self::Done;
                }
                Self::Chunked(chunk) => match chunk.step(input, out)? {
                    Step::More => {}
                    Step::Wait => return Ok(()),
                    Step::End => *self = Self::Done,
                },
            }
        }
    }
}

enum Step {
    More,
    Wait,
    End,
}

impl Chunk {
    fn step(&mut self, input: &mut &[u8], out: &mut BytesMut) -> Result<Step, WireError> {
        match self {
            Self::Size => {
                let Some(newline) = memchr::memchr(b'\n', &input[..input.len().min(LINE_MAX)]) else {
                    return if input.len() >= LINE_MAX { Err(WireError::ChunkSize) } else { Ok(Step::Wait) };
                };
                let size = chunk_size(&input[..newline]).ok_or(WireError::ChunkSize)?;
                input.advance(newline + 1);
                *self = if size == 0 { Self::Trailers(0) } else { Self::Bytes(size) };
            }
            Self::Bytes(left) => {
                *left -= pass(input, out, *left);
                if *left > 0 {
                    return Ok(Step::Wait);
                }
                *self = Self::End;
            }
            Self::End => match &input[..] {
                [b'\r', b'\n', ..] => {
                    input.advance(2);
                    *self = Self::Size;
                }
                [] | [b'\r'] => return Ok(Step::Wait),
                _ => return Err(WireError::ChunkEnd),
            },
            Self::Trailers(dropped) => {
                let Some(newline) = memchr::memchr(b'\n', input) else {
                    let long = input.len() + *dropped > TRAILER_MAX;
                    return if long { Err(WireError::TrailersTooLarge) } else { Ok(Step::Wait) };
                };
                let empty = matches!(&input[..newline], [] | [b'\r']);
                *dropped += newline + 1;
                input.advance(newline + 1);
                if empty {
                    return Ok(Step::End);
                }
                if *dropped > TRAILER_MAX {
                    return Err(WireError::TrailersTooLarge);
                }
            }
        }
        Ok(Step::More)
    }
}

/// Moves at most `most` bytes and returns their number.
fn pass(input: &mut &[u8], out: &mut BytesMut, most: u64) -> u64 {
    let count = input.len().min(usize::try_from(most).unwrap_or(usize::MAX));
    out.extend_from_slice(&input[..count]);
    input.advance(count);
    count as u64
}

/// Parses a size line without `\n`: hexadecimal digits, then nothing, blanks or an extension.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let digits = line.iter().map_while(|byte| char::from(*byte).to_digit(16));
    let (digits, size) = digits.fold((0, 0), |(count, size), digit| (count + 1, size << 4 | u64::from(digit)));
    let behind = line.get(digits).copied();
    if digits == 0 || digits > 15 || !matches!(behind, None | Some(b';' | b' ' | b'\t')) {
        return None;
    }
    Some(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(text: &str) -> Result<Option<ParsedHead>, WireError> {
        take_head(&mut BytesMut::from(text.as_bytes()))
    }

    /// Reads a body in pieces of `size`. Returns the framing, the body and the bytes after it.
    fn read(mut framing: Framing, body: &[u8], size: usize) -> Result<(Framing, Vec<u8>, Vec<u8>), WireError> {
        let (mut input, mut out) = (BytesMut::new(), BytesMut::new());
        for piece in body.chunks(size) {
            input.extend_from_slice(piece);
            framing.decode(&mut input, &mut out)?;
        }
        Ok((framing, out.to_vec(), input.to_vec()))
    }

    #[test]
    fn a_head_is_taken_when_it_is_whole_and_not_before() {
        let text = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nx-empty:\r\ncontent-length: 2\r\n\r\nhi";
        for cut in 0..text.len() - 2 {
            assert!(head(&text[..cut]).unwrap().is_none(), "{cut}");
        }
        let mut input = BytesMut::from(text);
        let head = take_head(&mut input).unwrap().unwrap();
        assert_eq!((head.status, head.framing, head.keepalive), (StatusCode::OK, Framing::Length(2), true));
        assert_eq!(head.headers["content-type"], "text/plain");
        assert_eq!(head.headers["x-empty"], "");
        assert_eq!(&input[..], b"hi");
    }

    #[test]
    fn framing_that_could_be_misread_is_refused() {
        for lines in [
            "content-length: 2\r\ncontent-length: 3",
            "content-length: 2\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "content-length: +2",
            "content-length: 99999999999999999999999",
        ] {
            let response = head(&format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n"));
            assert_eq!(response.unwrap_err(), WireError::Framing, "{lines}");
        }
        assert!(head("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n").is_ok());
    }

    #[test]
    fn garbage_and_endless_heads_are_errors() {
        assert!(matches!(head("garbage\r\n\r\n"), Err(WireError::NotHttp(_))));
        let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "a".repeat(HEAD_MAX));
        assert_eq!(head(&endless).unwrap_err(), WireError::HeadTooLarge);
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(HEADERS_MAX + 1));
        assert_eq!(head(&many).unwrap_err(), WireError::HeadTooLarge);
    }

    #[test]
    fn a_connection_is_kept_as_the_answer_says() {
        let keeps = |text: &str| head(text).unwrap().unwrap().keepalive;
        assert!(keeps("HTTP/1.1 204 No Content\r\n\r\n"));
        assert!(!keeps("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: Close\r\n\r\n"));
        assert!(!keeps("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"));
        assert!(keeps("HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n\r\n"));
        assert!(!keeps("HTTP/1.1 200 OK\r\n\r\n"), "a body until close");
    }

    #[test]
    fn broken_chunks_are_errors() {
        let chunked = Framing::Chunked(Chunk::Size);
        let failure = |body: &[u8]| read(chunked, body, body.len()).unwrap_err();
        assert_eq!(failure(b"x\r\n"), WireError::ChunkSize);
        assert_eq!(failure(b"\r\n"), WireError::ChunkSize);
        assert_eq!(failure(b"ffffffffffffffff\r\n"), WireError::ChunkSize);
        assert_eq!(failure(&[b'1'; LINE_MAX]), WireError::ChunkSize);
        assert_eq!(failure(b"2\r\nabc\r\n"), WireError::ChunkEnd);
        let trailers = [b"0\r\n".to_vec(), b"x: y\r\n".repeat(TRAILER_MAX / 6 + 1)].concat();
        assert_eq!(failure(&trailers), WireError::TrailersTooLarge);
    }

    proptest! {
        #[test]
        fn chunks_come_out_whole_however_they_arrive(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..200), 0..8),
            size in 1..64usize,
        ) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                wire.extend_from_slice(format!("{:X};ext=1\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\ntrailer: x\r\n\r\nnext");
            let (framing, out, rest) = read(Framing::Chunked(Chunk::Size), &wire, size).unwrap();
            prop_assert_eq!(framing, Framing::Done);
            prop_assert_eq!(out, chunks.concat());
            prop_assert_eq!(rest, b"next");
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), size in 1..40usize) {
            let _ = take_head(&mut BytesMut::from(&bytes[..]));
            let _ = read(Framing::Chunked(Chunk::Size), &bytes, size);
        }
    }
}
