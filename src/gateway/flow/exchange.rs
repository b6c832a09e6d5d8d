//! The two seams of the request path: towards the client and towards vLLM.
//!
//! The path is generic over [`Downstream`] and [`Upstream`], so that pingora stays in `proxy/` and
//! the whole path also runs in memory on paused time, against the simulator, from a seed. Futures are
//! named in the traits to be `Send`; there is no `dyn` and nothing is allocated per chunk.
//!
//! Dropping an [`Exchange`] closes its connection, which is how an engine learns that nobody waits
//! for the answer any more (HTTP/1.1 has no other signal). Only [`Exchange::keep`] returns it for reuse.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode};

use crate::pool::Address;
use sluice_core::openai::EditedBody;

/// The head of a response.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    /// Its status.
    pub status: StatusCode,
    /// Its headers; hop-by-hop ones are already gone.
    pub headers: HeaderMap,
}

/// What is sent to a backend.
#[derive(Clone, Debug, Default)]
pub struct UpstreamRequest {
    /// Path and query, without the backend's prefix.
    pub path: String,
    /// Headers; no hop-by-hop ones, no `Host`, no `Content-Length`.
    pub headers: HeaderMap,
    /// The body, in pieces.
    pub body: EditedBody,
}

/// Why an exchange with a backend failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// No connection came about.
    #[error("no connection: {0}")]
    Connect(String),
    /// The connection ended before the answer did.
    #[error("connection closed early: {0}")]
    Closed(String),
    /// What came is not HTTP, or more than we are ready to read.
    #[error("unreadable answer: {0}")]
    Malformed(String),
}

/// The client is gone, or takes nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientGone;

/// Towards the client.
pub trait Downstream: Send {
    /// Sends the head. Called at most once, before any body.
    fn head(&mut self, head: ResponseHead) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// Sends body bytes now; nothing is kept back, unless they are the `last` ones and [`Downstream::finish`] follows
    /// at once: then they may leave with the end.
    fn body(&mut self, bytes: Bytes, last: bool) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// The answer is complete.
    fn finish(&mut self) -> impl Future<Output = Result<(), ClientGone>> + Send;

    /// The answer cannot be completed: the connection must be closed so that the client can tell.
    fn abort(&mut self);

    /// Resolves when the client has left. Cancel safe; may be called again after it was dropped.
    fn gone(&mut self) -> impl Future<Output = ()> + Send;
}

/// Towards vLLM.
pub trait Upstream: Send + Sync + 'static {
    /// One request and its answer on one connection.
    type Exchange: Exchange;

    /// Connects (or reuses a connection, unless `fresh`) and sends the whole request.
    fn send(
        &self,
        to: &Address,
        call: &UpstreamRequest,
        fresh: bool,
    ) -> impl Future<Output = Result<Self::Exchange, SendError>> + Send;
}

/// A request that could not be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendError {
    /// Why.
    pub broken: ExchangeError,
    /// It happened on a connection that had been used before: the keep-alive race, not a fault.
    pub reused: bool,
}

/// One request and its answer on one connection.
pub trait Exchange: Send {
    /// The connection had been used before.
    fn reused(&self) -> bool;

    /// How long it took to get the connection.
    fn connect_time(&self) -> Duration;

    /// Waits for the head of the answer. Cancel safe.
    fn head(&mut self) -> impl Future<Output = Result<ResponseHead, ExchangeError>> + Send;

    /// Waits for body bytes and appends everything that is there already, never waiting for more.
    /// `false` at the end of the body. Cancel safe.
    fn body(&mut self, into: &mut BytesMut) -> impl Future<Output = Result<bool, ExchangeError>> + Send;

    /// The bytes read so far were the last ones: [`Exchange::body`] will say so without waiting.
    fn at_end(&self) -> bool;

    /// The answer was read to its end: the connection may serve another request.
    fn keep(self) -> impl Future<Output = ()> + Send;
}
