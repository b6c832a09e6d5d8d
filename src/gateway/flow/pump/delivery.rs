//! The client's side of a response: one write at a time, and the backlog of a client that takes
//! bytes slower than the engine sends them.
//!
//! While a write waits for the client, the engine is read. The bytes are measured on arrival and
//! copied into the backlog, which is written in pieces of at most `PIECE` bytes once the client
//! takes the bytes before them.
//!
//! Bounds: see `parts.rs`. At a bound the engine is not read. The client causes that delay, so from
//! then on the stream has no ITL, TPOT and E2EL, because the engine no longer determines when bytes
//! arrive.

use std::future::Future;
use std::pin::Pin;

use tokio::time::Instant;

use super::super::attempt::FailedAttempt;
use super::super::exchange::{ClientGone, Exchange};
use super::super::record::{Outcome, Recorder, Stage};
use super::Pump;
use super::engine_side::{EngineEvent, EngineSide};
use super::parts::Ending;

impl<R: Recorder> Pump<'_, '_, R> {
    /// Waits until the client has taken a delivery, and reads the engine meanwhile. An error means
    /// that another engine may serve the request or continue the stream; the client has then taken
    /// the delivery.
    pub(super) async fn wait_for_client<X: Exchange>(
        &mut self,
        engine: &mut EngineSide<'_, '_, X>,
        mut delivery: Pin<&mut impl Future<Output = Result<(), ClientGone>>>,
    ) -> Result<Result<(), ClientGone>, Box<FailedAttempt<X>>> {
        let begun = Instant::now();
        let mut failed = None;
        let sent = loop {
            let event = if self.ending.is_some() || failed.is_some() {
                if self.ending.is_some() {
                    engine.reuse().await;
                }
                tokio::select! {
                    biased;
                    sent = delivery.as_mut() => break sent,
                    () = self.context.abort.cancelled() => {
                        self.record.outcome = Outcome::Timeout(Stage::Drain);
                        self.ending = Some(Ending::Stopped);
                        break Err(ClientGone);
                    }
                }
            } else if self.backlog.has_room(self.context.room()) {
                tokio::select! {
                    biased;
                    sent = delivery.as_mut() => break sent,
                    event = engine.next(std::future::pending()) => event,
                }
            } else {
                let since = self.hold_up();
                let _client_wait = self.lease.client_wait();
                let event = tokio::select! {
                    biased;
                    sent = delivery.as_mut() => Err(sent),
                    () = engine.aborted() => Ok(EngineEvent::Aborted),
                };
                engine.was_not_read(since, Instant::now());
                match event {
                    Ok(event) => event,
                    Err(sent) => break sent,
                }
            };
            match self.take(event, engine, Instant::now()) {
                Ok(more) => self.backlog.push(&more, self.context.room()),
                Err(other) => {
                    // The backend does no more work for this request, however slow its client is.
                    self.lease.release();
                    failed = Some(other);
                }
            }
        };
        self.record.client_wait += begun.elapsed();
        match failed {
            Some(failed) if sent.is_ok() => Err(failed),
            _ => Ok(sent),
        }
    }

    /// Notes that the engine is not read until the client takes bytes. Returns the current time.
    fn hold_up(&mut self) -> Instant {
        if !std::mem::replace(&mut self.is_held_up, true) {
            self.meter.stop_timing();
            self.record.held_up = true;
            self.lease.fell_behind();
        }
        Instant::now()
    }
}
