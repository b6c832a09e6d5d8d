//! The client, as the request path sees it: a pingora session behind the [`Downstream`] trait.
//!
//! Framing is decided here: the engine's `Content-Length` is kept; without one the body goes out in
//! chunks to HTTP/1.1 clients and until the connection closes to HTTP/1.0 ones.
//! A client that takes no byte for [`SEND_TIMEOUT`] is treated as gone: what it does not read fills the
//! engine's buffers on its behalf.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING};
use http::{StatusCode, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use tokio::time::timeout;

use super::headers;
use super::socket::ClientSocket;
use crate::flow::{ClientGone, Downstream, ResponseHead};

/// How long a client may take none of what is sent to it (nginx's `send_timeout`).
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// One client, for the length of one request.
pub(super) struct DownstreamConnection<'a> {
    session: &'a mut ServerSession,
    /// The answer has a `Content-Length`.
    sized: bool,
    finished: bool,
    aborted: bool,
}

impl<'a> DownstreamConnection<'a> {
    pub(super) fn new(session: &'a mut ServerSession) -> Self {
        Self { session, sized: false, finished: false, aborted: false }
    }

    /// While corked, nothing leaves: more follows at once.
    fn cork(&self, corked: bool) {
        let socket = self.session.stream().and_then(|stream| (**stream).as_any().downcast_ref::<ClientSocket>());
        if let Some(socket) = socket {
            socket.cork(corked);
            socket.pass(!corked && self.sized);
        }
    }

    /// The answer was sent to its end: the connection may be used again.
    pub(super) fn is_finished(&self) -> bool {
        self.finished && !self.aborted
    }
}

impl Downstream for DownstreamConnection<'_> {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        let mut headers = head.headers;
        headers::remove_hop_by_hop(&mut headers);
        let version = self.session.req_header().version;
        let bodyless = head.status == StatusCode::NO_CONTENT || head.status == StatusCode::NOT_MODIFIED;
        if version == Version::HTTP_11 && !bodyless && !headers.contains_key(CONTENT_LENGTH) {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        self.sized = headers.contains_key(CONTENT_LENGTH);
        let (mut parts, ()) = http::Response::new(()).into_parts();
        parts.status = head.status;
        parts.headers = headers;
        // The first bytes follow at once: the head leaves with them.
        self.cork(true);
        let sending = self.session.write_response_header(Box::new(ResponseHeader::from(parts)));
        sent(timeout(SEND_TIMEOUT, sending).await)
    }

    async fn body(&mut self, bytes: Bytes, last: bool) -> Result<(), ClientGone> {
        self.cork(last);
        sent(timeout(SEND_TIMEOUT, self.session.write_response_body(bytes, false)).await)
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.cork(false);
        sent(timeout(SEND_TIMEOUT, self.session.write_response_body(Bytes::new(), true)).await)?;
        self.finished = true;
        Ok(())
    }

    fn abort(&mut self) {
        self.aborted = true;
    }

    async fn gone(&mut self) {
        // Waits for the end of the client's side; bytes that arrive are the next request, kept for it.
        while self.session.read_body_or_idle(true).await.is_ok() {}
    }
}

fn sent<E>(result: Result<Result<(), E>, tokio::time::error::Elapsed>) -> Result<(), ClientGone> {
    match result {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(ClientGone),
    }
}
