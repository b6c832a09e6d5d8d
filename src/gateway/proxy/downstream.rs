//! The client, as the request path sees it: a pingora session behind the [`Downstream`] trait.
//!
//! The engine's `Content-Length` is kept. Without one, an HTTP/1.1 client gets chunks, and an
//! HTTP/1.0 client gets the body until the connection closes.
//!
//! A client that accepts no byte for `timeouts.send` counts as disconnected. pingora's own limit on
//! an HTTP/2 write is for all of its bytes together, which would cut a client that reads slowly, so
//! this file writes the body of a stream itself. It also writes chunks itself, except with TLS:
//! pingora would need four times the instructions.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::{Method, StatusCode, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::timeout;

use super::client_handle::{Chunk, ClientHandle};
use super::cors::CrossOrigin;
use super::http2;
use super::socket::SocketState;
use crate::flow::{ClientGone, Downstream, ResponseHead};

pub(super) struct DownstreamConnection<'a> {
    session: &'a mut ServerSession,
    origin: CrossOrigin,
    sized: bool,
    /// Whether the body is sent in chunks.
    chunked: bool,
    finished: bool,
    aborted: bool,
    pause: Duration,
    socket: Option<Arc<SocketState>>,
    /// The body of an HTTP/2 response, after the head.
    stream: Option<SendStream<Bytes>>,
}

impl<'a> DownstreamConnection<'a> {
    pub(super) fn new(session: &'a mut ServerSession, origin: CrossOrigin, pause: Duration) -> Self {
        let socket = ClientHandle::of(session).map(|client| Arc::clone(client.state));
        let [sized, chunked, finished, aborted] = [false; 4];
        Self { session, origin, sized, chunked, finished, aborted, pause, socket, stream: None }
    }

    /// Corks or uncorks the socket, which holds writes back while corked.
    fn cork(&self, corked: bool) {
        if let Some(socket) = &self.socket {
            socket.cork(corked);
            socket.unbuffered(!corked && self.sized);
        }
    }

    /// Ends the response. Returns whether it was sent completely, so that the connection can be
    /// used again.
    pub(super) async fn end(mut self) -> bool {
        let is_whole = self.finished && !self.aborted;
        if let Some(stream) = self.stream.as_mut().filter(|_| !is_whole) {
            http2::deliver(stream).await;
        }
        is_whole
    }
}

impl Downstream for DownstreamConnection<'_> {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        let mut headers = head.headers;
        std::mem::take(&mut self.origin).apply(&mut headers);
        let request = self.session.req_header();
        let bodyless = head.status == StatusCode::NO_CONTENT || head.status == StatusCode::NOT_MODIFIED;
        self.sized = headers.contains_key(CONTENT_LENGTH);
        if request.version == Version::HTTP_11 && !bodyless && !self.sized {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            self.chunked = request.method != Method::HEAD;
        }
        let (mut parts, ()) = http::Response::new(()).into_parts();
        parts.status = head.status;
        parts.headers = headers;
        // Head and body are sent together.
        self.cork(true);
        let (socket, pause) = (self.socket.as_deref(), self.pause);
        let sending = self.session.write_response_header(Box::new(ResponseHeader::from(parts)));
        Box::pin(send(sending, socket, pause)).await?;
        if let ServerSession::H2(session) = &mut *self.session {
            self.stream = session.take_response_body_writer();
        }
        Ok(())
    }

    async fn body(&mut self, bytes: Bytes, more: bool) -> Result<(), ClientGone> {
        if let Some(stream) = &mut self.stream {
            return write(stream, bytes, self.pause).await;
        }
        if self.chunked
            && !(more || bytes.is_empty())
            && let Some(client) = ClientHandle::of(self.session).filter(|client| client.is_direct)
        {
            let mut chunk = Chunk::of(&bytes);
            return match client.try_send(&mut chunk) {
                Ok(true) => Ok(()),
                Ok(false) => Box::pin(send(client.send(chunk), self.socket.as_deref(), self.pause)).await,
                Err(_) => Err(ClientGone),
            };
        }
        self.cork(more);
        // pingora's writes are boxed: each open stream would have room for their state, 1.6 KB.
        let sending = self.session.write_response_body(bytes, false);
        Box::pin(send(sending, self.socket.as_deref(), self.pause)).await
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        if let Some(stream) = &mut self.stream {
            stream.send_data(Bytes::new(), true).map_err(|_| ClientGone)?;
        } else {
            self.cork(false);
            let sending = self.session.write_response_body(Bytes::new(), true);
            Box::pin(send(sending, self.socket.as_deref(), self.pause)).await?;
        }
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        match (ClientHandle::of(self.session), &mut self.stream) {
            (Some(client), _) => client.left().await,
            // Only this stream is read, not the other requests of the connection.
            (None, Some(stream)) => drop(poll_fn(|cx| stream.poll_reset(cx)).await),
            (None, None) => while self.session.read_body_or_idle(true).await.is_ok() {},
        }
    }
}

/// Waits until the socket has all bytes. If it accepts none for `pause`, the client has left.
/// Nearly every write is accepted at once and needs no timer.
pub(super) async fn send<T, E>(
    sending: impl Future<Output = Result<T, E>>,
    socket: Option<&SocketState>,
    pause: Duration,
) -> Result<(), ClientGone> {
    let mut sending = pin!(sending);
    let sent = match poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await {
        Poll::Ready(sent) => sent,
        Poll::Pending => loop {
            let accepted = socket.map(SocketState::accepted);
            match timeout(pause, sending.as_mut()).await {
                Ok(sent) => break sent,
                Err(_) if accepted == socket.map(SocketState::accepted) => return Err(ClientGone),
                Err(_) => {}
            }
        },
    };
    sent.map(drop).map_err(|_| ClientGone)
}

/// Writes into an HTTP/2 stream. The client has left if its window admits no byte for `pause`.
async fn write(stream: &mut SendStream<Bytes>, mut bytes: Bytes, pause: Duration) -> Result<(), ClientGone> {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let room = match poll_fn(|cx| Poll::Ready(stream.poll_capacity(cx))).await {
            Poll::Ready(room) => room,
            Poll::Pending => timeout(pause, poll_fn(|cx| stream.poll_capacity(cx))).await.map_err(|_| ClientGone)?,
        };
        let Some(Ok(room)) = room else { return Err(ClientGone) };
        let piece = bytes.split_to(room.min(bytes.len()));
        if !piece.is_empty() {
            stream.send_data(piece, false).map_err(|_| ClientGone)?;
        }
    }
    Ok(())
}
