//! The engine's side of a response: the exchange, and the events that end a wait for it.
//!
//! It knows nothing of the client. The pump passes in the future that resolves when the client
//! leaves.

use std::future::Future;
use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFuture;

use super::super::exchange::{Exchange, ExchangeError};
use super::super::stream_work::{SilenceTimer, WorkClock};

pub(super) enum EngineEvent {
    Bytes,
    /// The body has ended properly.
    End,
    Broken(ExchangeError),
    /// The backend was found hung, or the gateway aborts all requests.
    Aborted,
    /// Nothing came until the silence limit.
    Quiet,
    ClientGone,
}

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

    pub(super) async fn aborted(&mut self) {
        self.aborted.as_mut().await;
    }

    pub(super) fn at_end(&self) -> bool {
        self.chunk.is_empty() && self.exchange.as_ref().is_none_or(Exchange::at_end)
    }

    /// Extends the limit by the time since `since`, in which the engine was not read because of a
    /// slow client.
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
