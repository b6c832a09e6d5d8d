//! The client, as the request path sees it: a pingora session behind the [`Downstream`] trait.
//!
//! Framing is decided here: the engine's `Content-Length` is kept. Without one, an HTTP/1.1 client
//! gets chunks, and an HTTP/1.0 client gets the body until the connection closes.
//!
//! A client that accepts no byte for `timeouts.send` counts as disconnected. Until then the request
//! path keeps its bytes.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::{StatusCode, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::timeout;

use super::cors::CrossOrigin;
use super::headers;
use super::socket::ClientHandle;
use crate::flow::{ClientGone, Downstream, ResponseHead};

pub(super) struct DownstreamConnection<'a> {
    session: &'a mut ServerSession,
    /// Decides which pages may read the response.
    origin: CrossOrigin,
    sized: bool,
    finished: bool,
    aborted: bool,
    /// `timeouts.send`; `None` with HTTP/2, where the session has it.
    pause: Option<Duration>,
}

impl<'a> DownstreamConnection<'a> {
    pub(super) fn new(session: &'a mut ServerSession, origin: CrossOrigin, pause: Duration) -> Self {
        // With HTTP/2, each byte that the client's window admits is progress of a write.
        let is_http2 = ClientHandle::of(session).is_none();
        if is_http2 {
            session.set_write_timeout(Some(pause));
        }
        let pause = (!is_http2).then_some(pause);
        Self { session, origin, sized: false, finished: false, aborted: false, pause }
    }

    /// While corked, writes are held back, because more bytes follow at once.
    fn cork(&self, corked: bool) {
        if let Some(client) = ClientHandle::of(self.session) {
            client.cork(corked);
            client.unbuffered(!corked && self.sized);
        }
    }

    /// Whether the response was sent completely, so that the connection can be used again.
    pub(super) fn is_finished(&self) -> bool {
        self.finished && !self.aborted
    }
}

impl Downstream for DownstreamConnection<'_> {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        let mut headers = head.headers;
        headers::remove_hop_by_hop(&mut headers);
        std::mem::take(&mut self.origin).apply(&mut headers);
        let version = self.session.req_header().version;
        let bodyless = head.status == StatusCode::NO_CONTENT || head.status == StatusCode::NOT_MODIFIED;
        if version == Version::HTTP_11 && !bodyless && !headers.contains_key(CONTENT_LENGTH) {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        self.sized = headers.contains_key(CONTENT_LENGTH);
        let (mut parts, ()) = http::Response::new(()).into_parts();
        parts.status = head.status;
        parts.headers = headers;
        // The first bytes of the body follow at once: head and body are sent together.
        self.cork(true);
        let pause = self.pause;
        send(self.session.write_response_header(Box::new(ResponseHeader::from(parts))), pause).await
    }

    async fn body(&mut self, bytes: Bytes, more: bool) -> Result<(), ClientGone> {
        self.cork(more);
        send(self.session.write_response_body(bytes, false), self.pause).await
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.cork(false);
        send(self.session.write_response_body(Bytes::new(), true), self.pause).await?;
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        match ClientHandle::of(self.session) {
            Some(client) => client.left().await,
            // HTTP/2: only this stream is read, so other requests of the connection are not
            // affected.
            None => while self.session.read_body_or_idle(true).await.is_ok() {},
        }
    }
}

/// Sends within `pause`. Nearly every write is accepted at once and needs no timer.
async fn send<T, E>(sending: impl Future<Output = Result<T, E>>, pause: Option<Duration>) -> Result<(), ClientGone> {
    let mut sending = pin!(sending);
    let sent = match poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await {
        Poll::Ready(sent) => sent,
        Poll::Pending => match pause {
            Some(pause) => timeout(pause, sending).await.map_err(|_| ClientGone)?,
            None => sending.await,
        },
    };
    sent.map(drop).map_err(|_| ClientGone)
}
