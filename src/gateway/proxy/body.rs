//! Reading a request body, bounded in size, in time, and together with all others in memory.
//!
//! A body that announces more than the limit, or more than there is memory for now, is refused before a byte of it is read;
//! one that does not announce its size is refused when it passes either. Memory grows with what arrives, not with what
//! was announced. A body must arrive at a minimum rate, judged period by period ([`Pace`]).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use pingora::protocols::http::ServerSession;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::clients::CountedBytes;

/// Most of an announced size that is allocated at once; pages that no byte has reached yet take no memory. A larger body
/// is moved as it grows, which leaves its old place behind for a moment.
const INITIAL_CAPACITY: usize = 4 << 20;

/// Bytes of a body that are read before other requests get their turn, when more of it is always there.
const TURN: usize = 512 << 10;

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// Larger than the limit.
    TooLarge,
    /// It arrives below the minimum rate.
    TooSlow,
    /// The bodies of all requests take up the memory for them.
    NoMemory,
    /// The chunks are malformed.
    Malformed,
    /// The gateway stops.
    Stopping,
    /// The client left.
    ClientGone,
}

/// The size a request announces, if it does.
pub(super) fn announced(session: &ServerSession) -> Option<u64> {
    session.get_header(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// What bounds a body besides its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// In each of these periods
    pub(super) period: Duration,
    /// this many bytes must arrive, or the end of the body.
    pub(super) bytes: usize,
}

impl Pace {
    /// `rate`: bytes per second.
    pub(super) fn new(period: Duration, rate: u64) -> Self {
        Self { period, bytes: (period.as_secs_f64() * rate as f64) as usize }
    }
}

/// A body that is being read.
struct Reading<'a> {
    session: &'a mut ServerSession,
    limit: u64,
    pace: Pace,
    counted: CountedBytes,
    received: usize,
    /// When the period that runs now ends, and what must have been received by then.
    deadline: Instant,
    wanted: usize,
    /// How many bytes are received before other requests get their turn.
    turn: usize,
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
        // What came faster earns no time: else a client could send most of a body and then hold it.
        if self.received >= self.wanted {
            self.deadline = Instant::now() + self.pace.period;
            self.wanted = self.received + self.pace.bytes;
        }
        if self.received >= self.turn {
            self.turn = self.received + TURN;
            yield_now().await;
        }
        Ok(Some(piece))
    }
}

/// Reads the whole body. Its bytes are counted in `counted` until the body is dropped.
pub(super) async fn read(
    session: &mut ServerSession,
    limit: u64,
    pace: Pace,
    counted: CountedBytes,
) -> Result<Bytes, BodyError> {
    let size = announced(session);
    if size.is_some_and(|size| size > limit) {
        return Err(BodyError::TooLarge);
    }
    // It would be refused in the middle, after its bytes were read for nothing.
    if size.is_some_and(|size| !counted.has_room(size)) {
        return Err(BodyError::NoMemory);
    }
    let deadline = Instant::now() + pace.period;
    let mut reading = Reading { session, limit, pace, counted, received: 0, deadline, wanted: pace.bytes, turn: TURN };
    let Some(first) = reading.next().await? else { return Ok(Bytes::new()) };
    if size.is_some_and(|size| size == first.len() as u64) {
        return Ok(reading.counted.keep(first));
    }
    let expected = size.map_or(first.len() * 2, |size| usize::try_from(size).unwrap_or(usize::MAX));
    let mut body = BytesMut::with_capacity(expected.min(INITIAL_CAPACITY));
    body.extend_from_slice(&first);
    while let Some(piece) = reading.next().await? {
        if body.len() + piece.len() > body.capacity() {
            // Doubling, and the announced size at most: a 400 KB prompt is moved once.
            body.reserve(expected.saturating_sub(body.len()).min(body.len().max(INITIAL_CAPACITY)).max(piece.len()));
        }
        body.extend_from_slice(&piece);
    }
    Ok(reading.counted.keep(body.freeze()))
}

/// Whether the client left or sent something that is not a body.
fn cause(error: &pingora::Error) -> BodyError {
    use pingora::ErrorType::{ConnectionClosed, ReadError};
    match error.etype() {
        ConnectionClosed | ReadError => BodyError::ClientGone,
        // The body ended before its announced length; pingora keeps the constant to itself.
        other if other.as_str() == "PrematureBodyEnd" => BodyError::ClientGone,
        _ => BodyError::Malformed,
    }
}
