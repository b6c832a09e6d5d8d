//! Incremental reader of one HTTP/1.1 response, which times it and compares it with another.
//!
//! `feed` takes bytes as they arrive, in pieces of any length. A body ends by `content-length`, by
//! `chunked`, or with the connection. A hash of the decoded bytes (xxh3) shows whether a response
//! through a proxy equals a direct one, without storing either.
//!
//! The reader counts events by their closing blank line, as vLLM frames them (`\n\n`), and does not
//! read their content. Bound: a head of 64 KiB.

use std::hash::Hasher as _;

use anyhow::{Context as _, bail};
use twox_hash::XxHash3_64;

/// Maximum length of a response head in bytes.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 64;
/// Length of `data: [DONE]` and its blank line.
const END: usize = 14;

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Head,
    /// Inside a body of known length, with the number of bytes left.
    Length(u64),
    /// Inside a body that ends with the connection.
    UntilClose,
    /// Inside a chunk-size line, with the size so far, and whether further digits belong to it.
    Size(u64, bool),
    /// Inside a chunk, with the number of bytes left.
    Chunk(u64),
    /// Between the data of a chunk and the next size line.
    ChunkEnd,
    /// After the last chunk, with the number of bytes in the current trailer line.
    Trailer(u64),
    Done,
}

pub(crate) struct Reply {
    state: State,
    head: Vec<u8>,
    hash: Box<XxHash3_64>,
    last_byte: u8,
    /// 0 before the head is complete.
    pub(crate) status: u16,
    /// Complete SSE events so far.
    pub(crate) events: u64,
    /// Decoded body bytes so far.
    pub(crate) bytes: u64,
    /// Value of `x-mock-body`: length and hash of the request body as the engine received it.
    pub(crate) request_seen: Option<String>,
    /// Whether the server sent `connection: close`.
    pub(crate) close: bool,
    pub(crate) retry_after: bool,
    /// The first bytes of the body, at most `keep`, for messages about a wrong response.
    pub(crate) start: Vec<u8>,
    keep: usize,
    /// The last bytes of the body. They are as many as are needed to tell an error event from
    /// `[DONE]`.
    end: [u8; END],
}

impl Reply {
    /// A reader before the first byte of a response. It keeps up to `keep` bytes of the body in
    /// `start`.
    pub(crate) fn keeping(keep: usize) -> Self {
        Self {
            state: State::Head,
            head: Vec::new(),
            hash: Box::new(XxHash3_64::new()),
            last_byte: 0,
            status: 0,
            events: 0,
            bytes: 0,
            request_seen: None,
            close: false,
            retry_after: false,
            start: Vec::new(),
            keep,
            end: [0; END],
        }
    }

    pub(crate) fn done(&self) -> bool {
        self.state == State::Done
    }

    /// xxh3 of the decoded body so far.
    pub(crate) fn digest(&self) -> u64 {
        self.hash.finish()
    }

    /// Whether a stream has events but does not end with `[DONE]`.
    pub(crate) fn failed_inside(&self) -> bool {
        self.events > 0 && self.end != *b"data: [DONE]\n\n"
    }

    /// Notes that the connection has ended, which completes a response whose body ends with the
    /// connection.
    pub(crate) fn end(&mut self) {
        if self.state == State::UntilClose {
            self.state = State::Done;
        }
    }

    /// Reads further bytes. Fails if they are not an HTTP/1.1 response.
    pub(crate) fn feed(&mut self, mut input: &[u8]) -> anyhow::Result<()> {
        while !input.is_empty() {
            match self.state {
                State::Head => {
                    let before = self.head.len();
                    self.head.extend_from_slice(input);
                    let Some(length) = self.parse_head()? else { return Ok(()) };
                    input = &input[length - before..];
                    self.head = Vec::new();
                }
                State::Length(left) => {
                    let n = self.body(&mut input, left);
                    self.state = if n == left { State::Done } else { State::Length(left - n) };
                }
                State::UntilClose => {
                    self.body(&mut input, u64::MAX);
                }
                State::Size(size, digits) => {
                    let byte = input[0];
                    input = &input[1..];
                    self.state = match (byte, char::from(byte).to_digit(16)) {
                        (b'\n', _) if size == 0 => State::Trailer(0),
                        (b'\n', _) => State::Chunk(size),
                        (_, Some(d)) if digits => {
                            State::Size(size.checked_mul(16).context("chunk size")? + u64::from(d), true)
                        }
                        _ => State::Size(size, false),
                    };
                }
                State::Chunk(left) => {
                    let n = self.body(&mut input, left);
                    self.state = if n == left { State::ChunkEnd } else { State::Chunk(left - n) };
                }
                State::ChunkEnd => {
                    if input[0] == b'\n' {
                        self.state = State::Size(0, true);
                    }
                    input = &input[1..];
                }
                State::Trailer(length) => {
                    self.state = match input[0] {
                        b'\n' if length == 0 => State::Done,
                        b'\n' => State::Trailer(0),
                        b'\r' => State::Trailer(length),
                        _ => State::Trailer(length + 1),
                    };
                    input = &input[1..];
                }
                State::Done => bail!("bytes after the end of the response"),
            }
        }
        Ok(())
    }

    fn body(&mut self, input: &mut &[u8], left: u64) -> u64 {
        let n = input.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let (part, rest) = input.split_at(n);
        *input = rest;
        self.hash.write(part);
        self.bytes += n as u64;
        if self.start.len() < self.keep {
            self.start.extend_from_slice(&part[..n.min(self.keep - self.start.len())]);
        }
        let kept = n.min(END);
        self.end.rotate_left(kept);
        self.end[END - kept..].copy_from_slice(&part[n - kept..]);
        for at in memchr::memchr_iter(b'\n', part) {
            let before = if at == 0 { self.last_byte } else { part[at - 1] };
            self.events += u64::from(before == b'\n');
        }
        self.last_byte = part.last().copied().unwrap_or(self.last_byte);
        n as u64
    }

    fn parse_head(&mut self) -> anyhow::Result<Option<usize>> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(length) = head.parse(&self.head)? else {
            if self.head.len() > MAX_HEAD {
                bail!("head too long");
            }
            return Ok(None);
        };
        self.status = head.code.unwrap_or(0);
        self.state = State::UntilClose;
        for header in head.headers.iter() {
            let value = std::str::from_utf8(header.value).unwrap_or("").trim();
            match header.name.to_ascii_lowercase().as_str() {
                "content-length" => match value.parse()? {
                    0 => self.state = State::Done,
                    n => self.state = State::Length(n),
                },
                "transfer-encoding" => self.state = State::Size(0, true),
                "connection" => self.close = value.eq_ignore_ascii_case("close"),
                "retry-after" => self.retry_after = true,
                "x-mock-body" => self.request_seen = Some(value.to_owned()),
                _ => {}
            }
        }
        Ok(Some(length))
    }
}
