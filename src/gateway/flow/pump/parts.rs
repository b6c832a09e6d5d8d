//! The parts of a response in the pump: one write, the waiting bytes, and the kinds of end.
//!
//! They know nothing of the pump, so that the files of the pump can share them.
//!
//! Bounds: [`STREAM_MAX`] bytes of one response wait for the client. The waiting bytes of all
//! responses are bounded by `server.max_response_memory`, which clients share by the rule in
//! `shares`: one place for each block. A read that begins while there is room may exceed a bound by
//! the size of that read. The write that waits for the client is not counted: at most [`WRITE_MAX`]
//! bytes.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::super::exchange::{ClientGone, Downstream, ExchangeError, ResponseHead};
use super::super::incoming::IncomingRequest;
use crate::shares::{Demand, Holding, Owner, Shares};
use sluice_core::meter::Forward;
use sluice_core::openai::error::StreamFailure;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The response is complete.
    Complete,
    /// The connection is closed once the client has the bytes that came before the end.
    Cut,
    /// The gateway stops, and the client has not read the rest.
    Stopped,
    ClientGone,
}

pub(super) enum Interruption {
    Broken(ExchangeError),
    /// The body ended properly, but a choice has no finish reason: the engine was stopped.
    Unfinished,
    /// The engine reported an error in the stream.
    InStream,
    Hung,
    Silent,
    /// The gateway stops, and the drain time is over.
    Stopping,
}

impl Interruption {
    /// The error that the client gets.
    pub(super) fn failure(&self) -> StreamFailure {
        match self {
            Self::Hung | Self::Silent => StreamFailure::UpstreamIdle,
            Self::Broken(_) | Self::Unfinished | Self::InStream => StreamFailure::UpstreamBroke,
            Self::Stopping => StreamFailure::ShuttingDown,
        }
    }
}

pub(super) const STREAM_MAX: usize = 1 << 20;
const BLOCK: usize = 8 << 10;
/// The most bytes of the backlog in one write.
const PIECE: usize = 2 << 10;
/// The most bytes of one write that do not come from the backlog. A read may return more; the rest
/// joins the backlog when the client does not take the first write.
const WRITE_MAX: usize = 16 << 10;

#[derive(Default)]
pub(super) struct Delivery {
    pub(super) head: Option<Box<ResponseHead>>,
    pub(super) preamble: Bytes,
    pub(super) forward: Forward,
    pub(super) finish: bool,
}

impl Delivery {
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_none() && !self.has_bytes() && !self.finish
    }

    pub(super) fn has_bytes(&self) -> bool {
        !self.preamble.is_empty() || !self.forward.is_empty()
    }

    /// Takes the bytes of the next write, at most [`WRITE_MAX`], and leaves the rest.
    pub(super) fn next_write(&mut self) -> Delivery {
        let bytes = self.preamble.len() + self.forward.iter().map(Bytes::len).sum::<usize>();
        if bytes <= WRITE_MAX {
            return std::mem::take(self);
        }
        let mut write = Delivery { head: self.head.take(), ..Delivery::default() };
        write.preamble = self.preamble.split_to(self.preamble.len().min(WRITE_MAX));
        let mut room = WRITE_MAX - write.preamble.len();
        let mut whole = 0;
        for piece in &mut self.forward {
            write.forward.push(piece.split_to(piece.len().min(room)));
            room -= write.forward.last().map_or(0, Bytes::len);
            if !piece.is_empty() || room == 0 {
                break;
            }
            whole += 1;
        }
        self.forward.drain(..whole);
        write
    }
}

/// Writes to the client. `more`: other bytes follow at once.
pub(super) async fn deliver<D: Downstream>(down: &mut D, delivery: Delivery, more: bool) -> Result<(), ClientGone> {
    let Delivery { head, preamble, forward, finish } = delivery;
    if let Some(head) = head {
        down.head(*head).await?;
    }
    let more = more || finish;
    if !preamble.is_empty() {
        down.body(preamble, more || !forward.is_empty()).await?;
    }
    // The pieces leave in one write, as far as the downstream side gathers them.
    let mut pieces = forward.into_iter().peekable();
    while let Some(piece) = pieces.next() {
        let more = more || pieces.peek().is_some();
        down.body(piece, more).await?;
    }
    if finish { down.finish().await } else { Ok(()) }
}

/// The memory in which the response to a request may wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingRoom<'a> {
    pub(super) memory: &'a Arc<Shares>,
    pub(super) incoming: &'a IncomingRequest,
}

impl WaitingRoom<'_> {
    /// A place for one block. `None`: the client has used its share, or there is no memory left.
    fn place(self) -> Option<Holding> {
        let owner = match &self.incoming.key {
            Some(key) => Owner::Key(Arc::clone(key.name())),
            None => Owner::Origin(self.incoming.origin),
        };
        self.memory.enter_kept(owner, Demand::of(BLOCK as u64))
    }
}

/// Waiting bytes, and the holding that reserves response memory for them. Without it they
/// exceed a bound.
struct Block {
    bytes: BytesMut,
    place: Option<Holding>,
}

#[derive(Default)]
pub(super) struct Backlog {
    blocks: VecDeque<Block>,
    bytes: usize,
    /// The place of the next block.
    spare: Option<Holding>,
}

impl Backlog {
    /// The next piece to write; the last one finishes a complete response. `None`: there is nothing
    /// to send.
    pub(super) fn next(&mut self, ending: Option<Ending>) -> Option<Delivery> {
        let block = match self.blocks.front_mut() {
            Some(Block { bytes, .. }) => bytes.split_to(bytes.len().min(PIECE)).freeze(),
            None if ending == Some(Ending::Complete) => {
                return Some(Delivery { finish: true, ..Delivery::default() });
            }
            None => return None,
        };
        self.bytes -= block.len();
        if self.blocks.front().is_some_and(|block| block.bytes.is_empty()) {
            self.blocks.pop_front();
        }
        if self.blocks.is_empty() {
            self.spare = None;
        }
        let finish = self.blocks.is_empty() && ending == Some(Ending::Complete);
        Some(Delivery { forward: std::iter::once(block).collect(), finish, ..Delivery::default() })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether the engine may be read for this client. Takes the place of the next block.
    pub(super) fn has_room(&mut self, room: WaitingRoom<'_>) -> bool {
        let places = self.blocks.iter_mut().map(|block| &mut block.place).chain([&mut self.spare]);
        let is_placed = |place: &mut Option<Holding>| {
            if place.is_none() {
                *place = room.place();
            }
            place.is_some()
        };
        self.bytes < STREAM_MAX && places.into_iter().all(is_placed)
    }

    /// Adds bytes that were read. Bytes beyond the client's share wait without a place, and no more
    /// are read until these have one.
    pub(super) fn push(&mut self, delivery: &Delivery, room: WaitingRoom<'_>) {
        self.append(&delivery.preamble, room);
        delivery.forward.iter().for_each(|piece| self.append(piece, room));
    }

    fn append(&mut self, mut bytes: &[u8], waiting: WaitingRoom<'_>) {
        self.bytes += bytes.len();
        while !bytes.is_empty() {
            let room = self.blocks.back().map_or(0, |block| BLOCK - block.bytes.len());
            if room == 0 {
                let place = self.spare.take().or_else(|| waiting.place());
                self.blocks.push_back(Block { bytes: BytesMut::new(), place });
                continue;
            }
            let (piece, rest) = bytes.split_at(room.min(bytes.len()));
            if let Some(block) = self.blocks.back_mut() {
                block.bytes.extend_from_slice(piece);
            }
            bytes = rest;
        }
    }
}
