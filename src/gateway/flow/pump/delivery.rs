//! The client's side of a response that is passed on: one write at a time, and the backlog of a
//! client that takes bytes slower than the engine sends them.
//!
//! A write that the client does not take at once is waited for, and the engine is read meanwhile.
//! Its bytes are measured as they arrive and copied into the backlog, which is written in pieces of
//! at most [`PIECE`] bytes once the client takes the bytes before them.
//!
//! Bounds: [`STREAM_MAX`] for one stream and the shares of `response_memory.rs` for one client and
//! for all. At a bound the engine is not read. That time is the client's: the stream has no ITL,
//! TPOT and E2EL from then on, since the times at which its bytes arrive are no longer the
//! engine's. One read of the engine may exceed a bound.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::super::attempt::FailedAttempt;
use super::super::exchange::{ClientGone, Downstream, Exchange, ResponseHead};
use super::super::record::{Outcome, Recorder, Stage};
use super::super::response_memory::{HeldMemory, MemoryOwner};
use super::Pump;
use super::ending::Ending;
use super::engine_side::{EngineEvent, EngineSide};
use sluice_core::meter::Forward;

/// Bytes of one response that may wait for its client.
pub(super) const STREAM_MAX: usize = 1 << 20;
/// Bytes of a block of the backlog.
const BLOCK: usize = 8 << 10;
/// Bytes of the backlog that are written as one. A client must take them within `timeouts.send`, so
/// that one which takes 35 bytes a second is not cut with the default.
const PIECE: usize = 2 << 10;
/// The same for bytes that a client may take at once.
const WRITE_MAX: usize = 16 << 10;

/// The bytes of one write, in order.
#[derive(Default)]
pub(super) struct Delivery {
    pub(super) head: Option<ResponseHead>,
    pub(super) preamble: Bytes,
    pub(super) forward: Forward,
    /// The response ends here.
    pub(super) finish: bool,
}

impl Delivery {
    /// Whether there is nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_none() && self.preamble.is_empty() && self.forward.is_empty() && !self.finish
    }
}

/// Sends a delivery.
pub(super) async fn deliver<D: Downstream>(down: &mut D, delivery: Delivery) -> Result<(), ClientGone> {
    let Delivery { head, preamble, forward, finish } = delivery;
    if let Some(head) = head {
        down.head(head).await?;
    }
    if !preamble.is_empty() {
        down.body(preamble, finish || !forward.is_empty()).await?;
    }
    // The pieces leave in one write, as far as they are gathered below.
    let mut pieces = forward.into_iter().peekable();
    while let Some(piece) = pieces.next() {
        let mut piece = piece;
        while piece.len() > WRITE_MAX {
            down.body(piece.split_to(WRITE_MAX), true).await?;
        }
        let more = finish || pieces.peek().is_some();
        down.body(piece, more).await?;
    }
    if finish { down.finish().await } else { Ok(()) }
}

/// Bytes that a client has not taken yet.
#[derive(Default)]
pub(super) struct Backlog {
    blocks: VecDeque<BytesMut>,
    bytes: usize,
    memory: Option<HeldMemory>,
}

impl Backlog {
    /// The next piece; the last one finishes a complete response. `None`: there is nothing to send.
    pub(super) fn next(&mut self, ending: Option<Ending>) -> Option<Delivery> {
        let block = match self.blocks.front_mut() {
            Some(block) => block.split_to(block.len().min(PIECE)).freeze(),
            None if ending == Some(Ending::Complete) => {
                return Some(Delivery { finish: true, ..Delivery::default() });
            }
            None => return None,
        };
        self.bytes -= block.len();
        if self.blocks.front().is_some_and(BytesMut::is_empty) {
            self.blocks.pop_front();
        }
        if let Some(memory) = &mut self.memory {
            memory.set(self.bytes);
        }
        let finish = self.blocks.is_empty() && ending == Some(Ending::Complete);
        Some(Delivery { forward: std::iter::once(block).collect(), finish, ..Delivery::default() })
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether more may be read for a client.
    fn has_room(&self) -> bool {
        self.bytes < STREAM_MAX && self.memory.as_ref().is_none_or(HeldMemory::has_room)
    }

    fn push(&mut self, delivery: &Delivery, owner: MemoryOwner<'_>) {
        if delivery.preamble.is_empty() && delivery.forward.is_empty() {
            return;
        }
        self.append(&delivery.preamble);
        delivery.forward.iter().for_each(|piece| self.append(piece));
        self.memory.get_or_insert_with(|| owner.hold()).set(self.bytes);
    }

    fn append(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len();
        while !bytes.is_empty() {
            let room = self.blocks.back().map_or(0, |block| BLOCK - block.len());
            if room == 0 {
                self.blocks.push_back(BytesMut::new());
                continue;
            }
            let (piece, rest) = bytes.split_at(room.min(bytes.len()));
            if let Some(block) = self.blocks.back_mut() {
                block.extend_from_slice(piece);
            }
            bytes = rest;
        }
    }
}

impl<R: Recorder> Pump<'_, '_, R> {
    /// Waits until the client has taken a delivery, and reads the engine meanwhile. An error: another
    /// engine may serve the request; the client has taken the delivery.
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
            } else if self.backlog.has_room() {
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
                Ok(more) => self.backlog.push(&more, self.context.memory),
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

    /// The engine is not read any more until the client takes bytes.
    fn hold_up(&mut self) -> Instant {
        if !std::mem::replace(&mut self.is_held_up, true) {
            self.meter.stop_timing();
            self.record.held_up = true;
            self.lease.fell_behind();
        }
        Instant::now()
    }
}
