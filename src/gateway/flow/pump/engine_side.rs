//! The engine's side of a response that is passed on: its exchange, and the events that end a wait
//! for it.
//!
//! It knows nothing of the client: the pump passes in any other event that may end a wait.

use std::future::Future;
use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFuture;

use super::super::exchange::{Exchange, ExchangeError};
use super::super::stream_work::{SilenceTimer, WorkClock};

/// The next thing to happen to a response.
pub(super) enum EngineEvent {
    Bytes,
    /// The body has ended in order.
    End,
    Broken(ExchangeError),
    /// The backend was found hung, or the gateway aborts all requests.
    Aborted,
    /// Nothing came for as long as was to be waited.
    Quiet,
    ClientGone,
}

/// The engine's side of one response.
pub(super) struct EngineSide<'t, 'c, X> {
    exchange: &'t mut Option<X>,
    pub(super) chunk: BytesMut,
    pub(super) clock: WorkClock,
    pub(super) silence: SilenceTimer<'t>,
    aborted: Pin<&'t mut WaitForCancellationFuture<'c>>,
}

impl<'t, 'c, X: Exchange> EngineSide<'t, 'c, X> {
    /// `read`: bytes of the body that were read before.
    pub(super) fn new(
        exchange: &'t mut Option<X>,
        read: Bytes,
        clock: WorkClock,
        silence: SilenceTimer<'t>,
        aborted: Pin<&'t mut WaitForCancellationFuture<'c>>,
    ) -> Self {
        Self { exchange, chunk: BytesMut::from(read), clock, silence, aborted }
    }

    /// Waits for bytes, the end of the response, an event that ends it early, or `client`, which
    /// resolves when the client has left. Cancel safe.
    pub(super) async fn next(&mut self, client: impl Future<Output = ()>) -> EngineEvent {
        if !self.chunk.is_empty() {
            return EngineEvent::Bytes;
        }
        let Some(exchange) = self.exchange.as_mut() else { return EngineEvent::End };
        tokio::select! {
            biased;
            read = exchange.body(&mut self.chunk) => match read {
                Ok(true) => EngineEvent::Bytes,
                Ok(false) => EngineEvent::End,
                Err(error) => EngineEvent::Broken(error),
            },
            () = client => EngineEvent::ClientGone,
            () = self.aborted.as_mut() => EngineEvent::Aborted,
            () = self.silence.expired() => EngineEvent::Quiet,
        }
    }

    /// Waits until the exchange is aborted. Nothing is read.
    pub(super) async fn aborted(&mut self) {
        self.aborted.as_mut().await;
    }

    /// Whether the bytes read so far were the last ones.
    pub(super) fn at_end(&self) -> bool {
        self.chunk.is_empty() && self.exchange.as_ref().is_none_or(Exchange::at_end)
    }

    /// The engine was not read since `since`, because the client had not read: this was no silence
    /// of the engine.
    pub(super) fn was_not_read(&mut self, since: Instant, now: Instant) {
        self.silence.set_limit(self.clock.resume(now.saturating_duration_since(since)));
    }

    /// Closes the connection, unless the response was read to its end.
    pub(super) fn close(&mut self) {
        *self.exchange = None;
    }

    /// Returns the connection for reuse, if the response was read to its end.
    pub(super) async fn reuse(&mut self) {
        if let Some(exchange) = self.exchange.take().filter(Exchange::at_end) {
            exchange.keep_alive().await;
        }
    }
}
