//! Reads a request body, within bounds on size and time, and on the memory of all bodies together.
//!
//! A body is refused before a byte is read if the declared size exceeds the limit or the memory
//! that is free now. A body without a declared size is refused once it has exceeded one of them.
//! Memory is allocated as bytes arrive. A body must arrive at a minimum rate, checked in each
//! period ([`MinRate`]).

use std::future::poll_fn;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use pingora::protocols::http::ServerSession;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout, timeout_at};

use super::clients::CountedBytes;

/// The most bytes that are allocated for a declared size before bytes arrive. Above that, a buffer
/// is at most twice as large as the bytes received. A larger buffer would not be counted although
/// it is resident memory, because allocators hand out memory that was used before.
const INITIAL_CAPACITY: usize = 128 << 10;

/// Pieces are kept while they have this many bytes on average, because the overhead of an
/// allocation is not counted.
const PIECE_MIN: usize = 4 << 10;
/// Number of smaller pieces that are kept as well. The first piece is small, because it came with
/// the head.
const SMALL_PIECES: usize = 8;

/// Bytes after which the task yields, if the client sends faster than the body is read.
const YIELD_AFTER: usize = 512 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    TooLarge,
    TooSlow,
    /// All bodies together would exceed `max_body_memory`, or this body gave way to another
    /// client's.
    NoMemory,
    Malformed,
    Stopping,
    ClientGone,
}

pub(super) fn declared_size(session: &ServerSession) -> Option<u64> {
    session.get_header(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

#[derive(Clone, Copy, Debug)]
pub(super) struct MinRate {
    pub(super) period: Duration,
    /// Bytes that must arrive in each period, unless the body ends.
    pub(super) bytes: usize,
}

impl MinRate {
    /// `rate`: bytes per second.
    pub(super) fn new(period: Duration, rate: u64) -> Self {
        Self { period, bytes: (period.as_secs_f64() * rate as f64) as usize }
    }
}

struct Reading<'a> {
    session: &'a mut ServerSession,
    limit: u64,
    size: Option<u64>,
    min_rate: MinRate,
    counted: CountedBytes,
    received: usize,
    /// End of the current period, by which `wanted` bytes in all must have arrived.
    deadline: Instant,
    wanted: usize,
    yield_at: usize,
}

impl Reading<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, BodyError> {
        // `poll_gave_way` is polled only when there is nothing to read, so that a piece that has
        // arrived costs nothing.
        let read = tokio::select! {
            biased;
            read = timeout_at(self.deadline, self.session.read_request_body()) => read,
            () = poll_fn(|cx| self.counted.poll_gave_way(cx)) => return Err(BodyError::NoMemory),
        };
        let piece = match read {
            Ok(Ok(Some(piece))) => piece,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(error)) => return Err(cause(&error)),
            Err(_) => return Err(BodyError::TooSlow),
        };
        self.received += piece.len();
        if self.received as u64 > self.limit {
            return Err(BodyError::TooLarge);
        }
        let counted = match self.size == Some(self.received as u64) {
            true => self.counted.grow_to_end(piece.len()),
            false => self.counted.grow(piece.len()),
        };
        if !counted {
            return Err(BodyError::NoMemory);
        }
        // Bytes that arrive early do not extend the time. Otherwise a client could send most of a
        // body fast and then pause.
        if self.received >= self.wanted {
            self.deadline = Instant::now() + self.min_rate.period;
            self.wanted = self.received + self.min_rate.bytes;
        }
        if self.received >= self.yield_at {
            self.yield_at = self.received + YIELD_AFTER;
            yield_now().await;
        }
        Ok(Some(piece))
    }
}

/// Reads the whole body. The bytes count in `counted` until the body is dropped.
pub(super) async fn read(
    session: &mut ServerSession,
    limit: u64,
    min_rate: MinRate,
    mut counted: CountedBytes,
) -> Result<Bytes, BodyError> {
    let size = declared_size(session);
    if size.is_some_and(|size| size > limit) {
        return Err(BodyError::TooLarge);
    }
    if let Some(size) = size {
        counted.expect(size);
    }
    // Without this check, the body would be refused half-way.
    if size.is_some_and(|size| !counted.has_room(size)) {
        return Err(BodyError::NoMemory);
    }
    let deadline = Instant::now() + min_rate.period;
    let mut reading = Reading {
        session,
        limit,
        size,
        min_rate,
        counted,
        received: 0,
        deadline,
        wanted: min_rate.bytes,
        yield_at: YIELD_AFTER,
    };
    let Some(first) = reading.next().await? else { return Ok(Bytes::new()) };
    if size.is_some_and(|size| size == first.len() as u64) {
        return Ok(reading.counted.keep(first));
    }
    let expected = size.map_or(first.len() * 2, |size| usize::try_from(size).unwrap_or(usize::MAX));
    let mut body = BodyBuffer { expected, ..BodyBuffer::default() };
    body.append(first, |size| reading.counted.spare_buffer(size));
    while let Some(piece) = reading.next().await? {
        body.append(piece, |size| reading.counted.spare_buffer(size));
    }
    if !reading.counted.complete() {
        return Err(BodyError::NoMemory);
    }
    Ok(reading.counted.keep_buffer(body.buffer))
}

/// Reads and drops the rest of a body, at most `most` bytes, until the client ends or resets it or
/// sends nothing for `pause`.
pub(super) async fn discard(session: &mut ServerSession, most: usize, pause: Duration) {
    let (mut received, mut yield_at) = (0, YIELD_AFTER);
    while received < most
        && !session.is_body_done()
        && let Ok(Ok(Some(piece))) = timeout(pause, session.read_request_body()).await
    {
        received += piece.len();
        if received >= yield_at {
            yield_at = received + YIELD_AFTER;
            yield_now().await;
        }
    }
}

/// The received part of a body.
///
/// The first half of a long body is kept in pieces, and then moves into a buffer of the declared
/// size, so that each byte is copied once.
#[derive(Default)]
struct BodyBuffer {
    expected: usize,
    /// The pieces so far; empty once there is a buffer.
    pieces: Vec<Bytes>,
    held: usize,
    buffer: BytesMut,
}

impl BodyBuffer {
    /// `spare` returns a left-over buffer for a body of the given size.
    fn append(&mut self, piece: Bytes, spare: impl FnOnce(usize) -> Option<BytesMut>) {
        let received = self.held + self.buffer.len() + piece.len();
        let pieces_max = SMALL_PIECES + received / PIECE_MIN;
        if self.buffer.is_empty() && self.pieces.len() < pieces_max && received < self.expected / 2 {
            self.held = received;
            self.pieces.push(piece);
            return;
        }
        if received > self.buffer.capacity() {
            let capacity = self.expected.min(INITIAL_CAPACITY.max(2 * received)).max(received);
            match if self.buffer.is_empty() { spare(capacity) } else { None } {
                Some(buffer) => self.buffer = buffer,
                None => self.buffer.reserve(capacity - self.buffer.len()),
            }
        }
        self.pieces.drain(..).for_each(|piece| self.buffer.extend_from_slice(&piece));
        self.held = 0;
        self.buffer.extend_from_slice(&piece);
    }

    #[cfg(test)]
    fn allocated(&self) -> usize {
        self.held + self.buffer.capacity()
    }
}

fn cause(error: &pingora::Error) -> BodyError {
    use pingora::ErrorType::{ConnectionClosed, ReadError};
    match error.etype() {
        ConnectionClosed | ReadError => BodyError::ClientGone,
        // The body ended before the declared length; pingora does not export this constant.
        other if other.as_str() == "PrematureBodyEnd" => BodyError::ClientGone,
        _ => BodyError::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_declared_and_not_sent_takes_no_memory() {
        let cases = [(8 << 20, 60_000), (8 << 20, 1_000), (400_000, 65_536), (20_000, 16_384), (2, 1)];
        let spares: [fn(usize) -> Option<BytesMut>; 2] = [|_| None, |size| Some(BytesMut::with_capacity(size * 5 / 4))];
        for ((expected, length), spare) in cases.into_iter().flat_map(|case| spares.map(|spare| (case, spare))) {
            let mut body = BodyBuffer { expected, ..BodyBuffer::default() };
            let sent: Vec<u8> = (0..expected).map(|n| (n / 100) as u8).collect();
            for piece in sent.chunks(length) {
                body.append(Bytes::copy_from_slice(piece), spare);
                let received = body.held + body.buffer.len();
                let most = INITIAL_CAPACITY.max(2 * received) * 5 / 4;
                assert!(body.allocated() <= most, "{} bytes allocated for {received} received", body.allocated());
            }
            assert!(body.buffer == sent, "{expected} in pieces of {length}");
        }
    }

    #[test]
    fn a_long_body_gets_one_buffer_of_its_size() {
        let mut body = BodyBuffer { expected: 400_000, ..BodyBuffer::default() };
        // The first piece came with the head.
        let capacities = [1_800, 65_536, 65_536, 65_536, 65_536, 65_536, 65_536].map(|length| {
            body.append(Bytes::from(vec![1; length]), |_| None);
            body.buffer.capacity()
        });
        assert_eq!(capacities, [0, 0, 0, 0, 400_000, 400_000, 400_000]);
    }

    #[test]
    fn a_spare_buffer_is_taken_once_where_a_new_one_would_be_allocated() {
        let mut body = BodyBuffer { expected: 400_000, ..BodyBuffer::default() };
        let mut asked = Vec::new();
        for _ in 0..6 {
            body.append(Bytes::from(vec![1; 66_667]), |size| {
                asked.push(size);
                Some(BytesMut::with_capacity(450_000))
            });
        }
        assert_eq!((asked, body.buffer.capacity()), (vec![400_000], 450_000));
        // A body that grows beyond the expected size moves to a new buffer.
        body.append(Bytes::from(vec![1; 66_667]), |_| panic!("bytes are there already"));
        assert_eq!(body.buffer.len(), 7 * 66_667);
    }

    #[test]
    fn a_body_without_a_declared_size_grows_with_what_arrives() {
        let mut body = BodyBuffer { expected: 120_000, ..BodyBuffer::default() };
        for _ in 0..100 {
            body.append(Bytes::from_static(&[7; 60_000]), |_| None);
            assert!(body.allocated() <= INITIAL_CAPACITY.max(2 * body.buffer.len() + 120_000));
        }
        assert!(body.buffer.len() == 6_000_000 && body.buffer.iter().all(|byte| *byte == 7));
    }
}
