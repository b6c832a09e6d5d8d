//! The two traits that connect the request path to the client and to vLLM.
//!
//! The path is generic over [`Downstream`] and [`Upstream`]: pingora stays in `proxy/`, and the
//! path also runs in memory on paused time, against the simulator, from a seed. The traits require
//! `Send` futures; there is no `dyn`, and nothing is allocated per chunk.
//!
//! Dropping an [`Exchange`] closes its connection, which makes the engine abort the request
//! (HTTP/1.1 has no other signal). Only [`Exchange::keep_alive`] returns the connection for reuse.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, StatusCode};

use sluice_config::Address;
use sluice_core::openai::EditedBody;

/// The head of a response.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    /// Its status.
    pub status: StatusCode,
    /// Its headers, without hop-by-hop headers.
    pub headers: HeaderMap,
}

impl ResponseHead {
    /// Whether the response is a stream of events. The case of letters in a media type does not
    /// matter, and parameters may follow.
    pub fn is_event_stream(&self) -> bool {
        let kind = self.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
        let essence = kind.split(|byte| *byte == b';').next().unwrap_or_default();
        self.status.is_success() && essence.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
    }

    /// Whether the body is compressed, although the gateway did not ask for compression.
    pub fn is_coded(&self) -> bool {
        let identity = |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
        self.headers.get_all(CONTENT_ENCODING).iter().any(|value| !identity(value))
    }

    /// Whether this is an event stream with gzip. If so, the head becomes the head of
    /// the decompressed stream.
    pub fn take_gzip(&mut self) -> bool {
        let gzip = |value: &HeaderValue| {
            let coding = value.as_bytes().trim_ascii();
            coding.eq_ignore_ascii_case(b"gzip") || coding.eq_ignore_ascii_case(b"x-gzip")
        };
        let mut codings = self.headers.get_all(CONTENT_ENCODING).iter();
        let is_gzip = codings.next().is_some_and(gzip) && codings.next().is_none() && self.is_event_stream();
        if is_gzip {
            self.headers.remove(CONTENT_ENCODING);
            self.headers.remove(CONTENT_LENGTH);
        }
        is_gzip
    }
}

/// The request that is sent to a backend.
#[derive(Clone, Debug, Default)]
pub struct UpstreamRequest {
    /// The method.
    pub method: Method,
    /// Path and query, without the backend's prefix.
    pub path: String,
    /// Headers, without hop-by-hop headers, `Host` and `Content-Length`.
    pub headers: HeaderMap,
    /// The body, in pieces.
    pub body: EditedBody,
    /// The name of the request in the engine's KV events.
    pub session: Option<u64>,
    /// The body as it would be without the experiment that the request is in, if that is another
    /// body. It is sent when the arm cannot serve the request.
    pub body_without_arm: Option<EditedBody>,
}

/// Why an exchange with a backend failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// No connection was established.
    #[error("no connection: {0}")]
    Connect(String),
    /// The connection was closed before the response was complete.
    #[error("connection closed early: {0}")]
    Closed(String),
    /// The backend took no byte of the request for `timeouts.send`.
    #[error("the backend stopped reading the request")]
    NotTaken,
    /// The response is not valid HTTP, or exceeds a limit.
    #[error("unreadable response: {0}")]
    Malformed(String),
}

/// The client has left, or does not read any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientGone;

/// Towards the client.
pub trait Downstream: Send {
    /// Sends the head. Called at most once, before any body.
    fn head(&mut self, head: ResponseHead) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// Sends body bytes without delay. If `more` is set, more bytes or [`Downstream::finish`]
    /// follow at once, and the bytes may be held back until then.
    fn body(&mut self, bytes: Bytes, more: bool) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// Ends a complete response.
    fn finish(&mut self) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// Marks the response as incomplete: the connection must be closed, so that the client notices.
    fn abort(&mut self);

    /// Resolves when the client has left. Cancel safe; may be called again after the future was
    /// dropped.
    fn gone(&mut self) -> impl Future<Output = ()> + Send;
}

/// Towards vLLM.
pub trait Upstream: Send + Sync + 'static {
    /// One request and its response on one connection.
    type Exchange: Exchange;

    /// Connects and sends the request until it is complete or the backend responds. If the response
    /// comes first, the rest of the request is sent while the response is read, unless the response
    /// is an error.
    fn send(
        &self,
        to: &Address,
        call: &UpstreamRequest,
        connection: Connection,
    ) -> impl Future<Output = Result<Self::Exchange, ExchangeError>> + Send;
}

/// Which connection a request may be sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// An idle connection, or a new one if there is none.
    Any,
    /// A new connection.
    New,
}

/// One request and its response on one connection.
pub trait Exchange: Send {
    /// Whether the connection was reused.
    fn reused(&self) -> bool;

    /// How long it took to get the connection.
    fn connect_time(&self) -> Duration;

    /// Waits for the head of the response. Cancel safe.
    fn head(&mut self) -> impl Future<Output = Result<ResponseHead, ExchangeError>> + Send;

    /// Waits for body bytes and appends all that are available. `false` at the end of the body.
    /// Cancel safe.
    fn body(&mut self, into: &mut BytesMut) -> impl Future<Output = Result<bool, ExchangeError>> + Send;

    /// Whether the bytes read so far were the last ones. If so, [`Exchange::body`] returns `false`
    /// without waiting.
    fn at_end(&self) -> bool;

    /// Returns the connection for reuse after the response was read to its end.
    fn keep_alive(self) -> impl Future<Output = ()> + Send;
}
