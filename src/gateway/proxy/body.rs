//! Reads a request body. Its size and time are bounded, and so is the memory of all bodies together.
//!
//! A body whose declared size is over the limit, or over the memory that is free now, is refused before a byte of it is read.
//! A body without a declared size is refused when it exceeds either. Memory is allocated as bytes arrive, not for the
//! declared size. A body must arrive at a minimum rate, which is checked in each period ([`MinRate`]).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use pingora::protocols::http::ServerSession;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::clients::CountedBytes;

/// The most that is allocated for a declared size before its bytes arrive. Beyond it a buffer is at most twice as large as
/// what it has received: an allocator hands out memory that was used before, so what a client declares and never sends
/// would be resident, and would not count.
const INITIAL_CAPACITY: usize = 128 << 10;

/// Bytes of a body that are read before the task yields to others, if the client sends faster than they are read.
const YIELD_AFTER: usize = 512 << 10;

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// Larger than the limit.
    TooLarge,
    /// It arrives below the minimum rate.
    TooSlow,
    /// The bodies of all requests together would exceed `max_body_memory`.
    NoMemory,
    /// The chunks are malformed.
    Malformed,
    /// The gateway is shutting down.
    Stopping,
    /// The client disconnected.
    ClientGone,
}

/// The declared size of the body (`Content-Length`), if any.
pub(super) fn declared_size(session: &ServerSession) -> Option<u64> {
    session.get_header(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// The minimum rate of a body.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinRate {
    /// Length of a period.
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

/// A body that is being read.
struct Reading<'a> {
    session: &'a mut ServerSession,
    limit: u64,
    min_rate: MinRate,
    counted: CountedBytes,
    received: usize,
    /// End of the current period, by which `wanted` bytes in all must have arrived.
    deadline: Instant,
    wanted: usize,
    /// The task yields when this many bytes in all have arrived.
    yield_at: usize,
}

impl Reading<'_> {
    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, BodyError> {
        let piece = match timeout_at(self.deadline, self.session.read_request_body()).await {
            Ok(Ok(Some(piece))) => piece,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(error)) => return Err(cause(&error)),
            Err(_) => return Err(BodyError::TooSlow),
        };
        self.received += piece.len();
        if self.received as u64 > self.limit {
            return Err(BodyError::TooLarge);
        }
        if !self.counted.grow(piece.len()) {
            return Err(BodyError::NoMemory);
        }
        // Bytes that arrive early do not extend the time. Otherwise a client could send most of a body fast and then pause.
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

/// Reads the whole body. Its bytes count in `counted` until the body is dropped.
pub(super) async fn read(
    session: &mut ServerSession,
    limit: u64,
    min_rate: MinRate,
    counted: CountedBytes,
) -> Result<Bytes, BodyError> {
    let size = declared_size(session);
    if size.is_some_and(|size| size > limit) {
        return Err(BodyError::TooLarge);
    }
    // Otherwise it would be refused half-way.
    if size.is_some_and(|size| !counted.has_room(size)) {
        return Err(BodyError::NoMemory);
    }
    let deadline = Instant::now() + min_rate.period;
    let mut reading = Reading {
        session,
        limit,
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
    let mut body = BytesMut::with_capacity(expected.min(INITIAL_CAPACITY));
    append(&mut body, &first, expected);
    while let Some(piece) = reading.next().await? {
        append(&mut body, &piece, expected);
    }
    Ok(reading.counted.keep(body.freeze()))
}

/// Adds a piece to a body of which `expected` bytes are expected; a buffer that is too small doubles.
fn append(body: &mut BytesMut, piece: &[u8], expected: usize) {
    if body.len() + piece.len() > body.capacity() {
        body.reserve(expected.saturating_sub(body.len()).min(body.len()).max(piece.len()));
    }
    body.extend_from_slice(piece);
}

/// Whether the client disconnected or sent a malformed body.
fn cause(error: &pingora::Error) -> BodyError {
    use pingora::ErrorType::{ConnectionClosed, ReadError};
    match error.etype() {
        ConnectionClosed | ReadError => BodyError::ClientGone,
        // The body ended before its declared length; pingora does not export this constant.
        other if other.as_str() == "PrematureBodyEnd" => BodyError::ClientGone,
        _ => BodyError::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_declared_and_not_sent_takes_no_memory() {
        let (declared, piece) = (64 << 20, [0; 60_000]);
        let mut body = BytesMut::with_capacity(INITIAL_CAPACITY);
        while body.len() + piece.len() <= declared {
            append(&mut body, &piece, declared);
            let most = INITIAL_CAPACITY.max(2 * body.len());
            assert!(body.capacity() <= most, "{} bytes allocated for {} received", body.capacity(), body.len());
        }
    }
}
