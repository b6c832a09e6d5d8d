//! Reading a request body, bounded in size and in time.
//!
//! A body that announces more than the limit is refused before a byte of it is read; one that does not
//! announce its size is refused when it passes the limit. Memory grows with what arrives, not with what
//! was announced. A refused client can still read the response: what it is still sending is read
//! and dropped for a bounded time and amount, because closing a socket with unread bytes in it resets the connection
//! and discards the response.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use pingora::protocols::http::ServerSession;
use tokio::time::{Instant, timeout};

/// Memory set aside for a body at once; more comes as bytes arrive.
const INITIAL_CAPACITY: usize = 1 << 20;
/// How long a refused client may go on sending.
const LINGER: Duration = Duration::from_secs(5);
/// How much a refused client may go on sending.
const LINGER_BYTES: usize = 256 << 20;

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// Larger than the limit.
    TooLarge,
    /// A pause longer than the timeout.
    TooSlow,
    /// The client left, or its framing is broken.
    ClientGone,
}

/// The size a request announces, if it does.
pub(super) fn announced(session: &ServerSession) -> Option<u64> {
    session.get_header(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Whether a request says twice, and so perhaps differently, where its body ends.
///
/// RFC 9112 (6.3) leaves a server the choice between refusing it and believing the chunks. We refuse, as nginx does:
/// a proxy in front of the gateway may have used the length. pingora drops the length from the parsed headers, so it
/// is looked for in the bytes; requests without `Transfer-Encoding`, nearly all, cost one look-up.
pub(super) fn is_framed_twice(session: &ServerSession) -> bool {
    if session.get_header(TRANSFER_ENCODING).is_none() {
        return false;
    }
    let Some(session) = session.as_http1() else { return false };
    let name = CONTENT_LENGTH.as_str().as_bytes();
    let head = session.get_headers_raw_bytes();
    head.split(|byte| *byte == b'\n').any(|line| {
        line.split_at_checked(name.len())
            .is_some_and(|(start, rest)| start.eq_ignore_ascii_case(name) && rest.trim_ascii_start().starts_with(b":"))
    })
}

/// Reads the whole body.
pub(super) async fn read(session: &mut ServerSession, limit: u64, pause: Duration) -> Result<Bytes, BodyError> {
    let size = announced(session);
    if size.is_some_and(|size| size > limit) {
        return Err(BodyError::TooLarge);
    }
    let Some(first) = next(session, pause).await? else { return Ok(Bytes::new()) };
    if first.len() as u64 > limit {
        return Err(BodyError::TooLarge);
    }
    if size.is_some_and(|size| size == first.len() as u64) {
        return Ok(first);
    }
    let expected = size.map_or(first.len() * 2, |size| usize::try_from(size).unwrap_or(usize::MAX));
    let mut body = BytesMut::with_capacity(expected.min(INITIAL_CAPACITY));
    body.extend_from_slice(&first);
    while let Some(chunk) = next(session, pause).await? {
        if (body.len() + chunk.len()) as u64 > limit {
            return Err(BodyError::TooLarge);
        }
        if body.len() + chunk.len() > body.capacity() {
            // Doubling, and the announced size at most: a 400 KB prompt is moved once.
            body.reserve(expected.saturating_sub(body.len()).min(body.len().max(INITIAL_CAPACITY)).max(chunk.len()));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

async fn next(session: &mut ServerSession, pause: Duration) -> Result<Option<Bytes>, BodyError> {
    match timeout(pause, session.read_request_body()).await {
        Ok(Ok(chunk)) => Ok(chunk),
        Ok(Err(_)) => Err(BodyError::ClientGone),
        Err(_) => Err(BodyError::TooSlow),
    }
}

/// Lets a refused client finish sending, within bounds, so that it can read the response.
pub(super) async fn linger(session: &mut ServerSession) {
    let until = Instant::now() + LINGER;
    let mut left = LINGER_BYTES;
    while let Ok(Ok(Some(chunk))) = tokio::time::timeout_at(until, session.read_request_body()).await {
        match left.checked_sub(chunk.len()) {
            Some(rest) => left = rest,
            None => return,
        }
    }
}
