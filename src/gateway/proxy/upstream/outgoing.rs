//! The part of a request that is still to send to an engine.
//!
//! A usual request is one write, because pieces of up to [`INLINE_BODY`] at the front of the body
//! are copied behind the head. A longer prompt is sent from the buffer in which it was received.
//! Sending stops whenever the socket is full, so that the response can be read in between.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use smallvec::SmallVec;
use tokio::io::AsyncWrite;

use super::super::headers::CREDENTIALS;
use crate::connect::EngineStream;
use crate::flow::UpstreamRequest;
use sluice_config::Address;
use sluice_core::vllm::kv_events::{SESSION, session_name};

/// Pieces of a body up to this many bytes are copied behind the head.
const INLINE_BODY: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Outgoing {
    /// The head, followed by the front of the body.
    gathered: BytesMut,
    pieces: SmallVec<[Bytes; 5]>,
    /// The first of `pieces` that is not sent completely.
    next: usize,
    sent: u64,
}

impl Outgoing {
    pub(super) fn new(to: &Address, request: &UpstreamRequest) -> Self {
        let mut gathered = request_head(to, request);
        let pieces = request.body.pieces();
        let inline = pieces.iter().take_while(|piece| piece.len() <= INLINE_BODY).count();
        for piece in &pieces[..inline] {
            gathered.extend_from_slice(piece);
        }
        Self { gathered, pieces: pieces[inline..].iter().cloned().collect(), next: 0, sent: 0 }
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends until the socket is full (`Pending`).
    pub(super) fn poll_send(&mut self, cx: &mut Context<'_>, stream: &mut EngineStream) -> Poll<io::Result<()>> {
        while let Some(front) = self.front() {
            let count = ready!(Pin::new(&mut *stream).poll_write(cx, front))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(count);
        }
        Pin::new(stream).poll_flush(cx)
    }

    fn front(&self) -> Option<&[u8]> {
        match self.gathered.is_empty() {
            false => Some(&self.gathered),
            true => self.pieces.get(self.next).map(|piece| &piece[..]),
        }
    }

    fn advance(&mut self, count: usize) {
        self.sent += count as u64;
        if !self.gathered.is_empty() {
            self.gathered.advance(count);
        } else if let Some(piece) = self.pieces.get_mut(self.next) {
            piece.advance(count);
            self.next += usize::from(piece.is_empty());
        }
    }
}

/// Writes the head. Values come from parsed headers and from the configuration, so they contain no
/// line breaks. The head has `Accept-Encoding: identity`, because a compressed stream can be
/// neither metered nor edited.
fn request_head(to: &Address, request: &UpstreamRequest) -> BytesMut {
    let inline = if request.body.len() <= INLINE_BODY { request.body.len() } else { 0 };
    let mut head = BytesMut::with_capacity(512 + request.path.len() + inline);
    let fixed = "\r\naccept-encoding: identity\r\n";
    for part in
        [request.method.as_str(), " ", &to.endpoint.prefix, &request.path, " HTTP/1.1\r\nhost: ", &to.authority, fixed]
    {
        head.extend_from_slice(part.as_bytes());
    }
    let own_key = to.api_key.as_ref();
    for (name, value) in &request.headers {
        if own_key.is_some() && CREDENTIALS.contains(name) {
            continue;
        }
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    if let Some(key) = own_key {
        for part in ["authorization: Bearer ", key.expose(), "\r\n"] {
            head.extend_from_slice(part.as_bytes());
        }
    }
    if let Some(rank) = to.rank {
        head.extend_from_slice(format!("x-data-parallel-rank: {rank}\r\n").as_bytes());
    }
    if let Some(session) = request.session.filter(|_| !request.headers.contains_key(SESSION)) {
        head.extend_from_slice(format!("{SESSION}: {}\r\n", session_name(session)).as_bytes());
    }
    head.extend_from_slice(b"content-length: ");
    head.put_slice(request.body.len().to_string().as_bytes());
    head.extend_from_slice(b"\r\n\r\n");
    head
}
