//! The parts of a response that is passed on: one write, the bytes that wait, and how it ends.
//!
//! They know nothing of the pump, so that its files can share them.
//!
//! Bounds: [`STREAM_MAX`] bytes wait for one client; those of all clients by `response_memory.rs`.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::super::exchange::{ClientGone, Downstream, ExchangeError, ResponseHead};
use super::super::response_memory::{HeldMemory, MemoryOwner};
use sluice_core::meter::Forward;

/// How a response ends at the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// In order.
    Complete,
    /// The connection is closed when the client has what came before the end.
    Cut,
    /// The gateway stops, and the client has not read the rest.
    Stopped,
    ClientGone,
}

/// Why the backend does not complete a response.
pub(super) enum Interruption {
    Broken(ExchangeError),
    /// The body ended in order, but a choice has no finish reason: the engine was stopped.
    Unfinished,
    Hung,
    Silent,
    /// The gateway stops, and its drain time is over.
    Stopping,
}

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
    pub(super) fn has_room(&self) -> bool {
        self.bytes < STREAM_MAX && self.memory.as_ref().is_none_or(HeldMemory::has_room)
    }

    pub(super) fn push(&mut self, delivery: &Delivery, owner: MemoryOwner<'_>) {
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
