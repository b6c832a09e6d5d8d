//! Reads the head of a request with a deadline and a size limit, and makes the checks that pingora
//! does not make.
//!
//! From the first byte on, a head must arrive within `server.header_timeout` and have at most
//! [`HEAD_BYTES_MAX`]. pingora only limits the pause between reads, and allows 1 MiB.
//!
//! A request that fails a check of framing or host is refused and the connection closed, because
//! the start of the next request is unknown:
//!
//! | request | response | as |
//! |---|---|---|
//! | HTTP/1.1 without `Host`, or an invalid one | 400 | RFC 9112 3.2, nginx |
//! | two lengths, even if they are the same; a length and a transfer coding | 400 | nginx |
//! | `Transfer-Encoding` with a coding other than `chunked` | 501 | RFC 9112 6.1, nginx |
//! | `chunked` twice | 400 | RFC 9112 6.1 (nginx: 501) |
//! | CONNECT | 501 | RFC 9110 9.1 (nginx: 400 or 405) |
//! | upgrade to a WebSocket, except on `/v1/realtime` | 501 | the client cannot go on without it |
//!
//! Every other `Upgrade` is ignored, as RFC 9110 (7.8) allows and nginx and HAProxy do: some
//! clients offer HTTP/2 in every request.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HOST, HeaderMap, TRANSFER_ENCODING, UPGRADE};
use http::{Method, Version};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use tokio::time::{Instant, sleep};

use super::client_handle::ClientHandle;
use sluice_config::limits::{MAX_HEADER_BYTES, RETRY_AFTER_MIN};
use sluice_core::openai::{Refusal, ShedReason};

/// The most bytes of a head, including the request line and separators.
const HEAD_BYTES_MAX: usize = MAX_HEADER_BYTES + (16 << 10);

/// How long a connection over the limit may take to send the request that will be refused.
pub(super) const REFUSED_TIME: Duration = Duration::from_secs(2);

/// How long a connection may be idle, and how long a head may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadTimes {
    pub(super) idle: Duration,
    pub(super) head: Duration,
}

impl HeadTimes {
    fn at_most(self, max: Duration) -> Self {
        Self { idle: self.idle.min(max), head: self.head.min(max) }
    }
}

#[derive(Debug)]
pub(super) enum NoHead {
    /// The client closed the connection or was idle for too long, other clients need the place, or
    /// the gateway shuts down.
    Closed,
    Refused(Refusal),
}

pub(super) async fn read(session: &mut ServerSession, times: HeadTimes, stop: &ShutdownWatch) -> Result<(), NoHead> {
    let Some(state) = ClientHandle::of(session).map(|client| Arc::clone(client.state)) else {
        // An HTTP/2 stream starts with a complete head, and `http2.rs` has the deadlines of the
        // connection.
        return if matches!(session.read_request().await, Ok(true)) { Ok(()) } else { Err(NoHead::Closed) };
    };
    let times = if state.is_refused() { times.at_most(REFUSED_TIME) } else { times };
    state.limit_head(HEAD_BYTES_MAX);
    let mut stop = stop.clone();
    let mut timer = pin!(sleep(times.idle));
    let mut begun = false;
    let read = {
        let mut reading = pin!(async {
            // pingora allocates its buffer of 4 KB before it waits.
            if let Some(client) = ClientHandle::of(session).filter(|client| client.is_drained && !state.has_begun()) {
                client.readable().await;
            }
            session.read_request().await
        });
        loop {
            // Polling `reading` sets the flag of `has_begun`, so the flag is checked in the same
            // poll.
            let first = poll_fn(|_| if state.has_begun() { Poll::Ready(()) } else { Poll::Pending });
            tokio::select! {
                biased;
                read = &mut reading => break read,
                () = first, if !begun => {
                    begun = true;
                    timer.as_mut().reset(Instant::now() + times.head);
                }
                () = timer.as_mut() => {
                    return Err(if begun { NoHead::Refused(Refusal::HeaderTimeout) } else { NoHead::Closed });
                }
                () = state.connection().gave_way() => {
                    return Err(if begun { NoHead::Refused(too_many()) } else { NoHead::Closed });
                }
                // On shutdown, a connection without a complete head is closed at once.
                _ = stop.wait_for(|stopping| *stopping) => return Err(NoHead::Closed),
            }
        }
    };
    match read {
        Ok(true) => {
            state.limit_head(usize::MAX);
            Ok(())
        }
        Ok(false) => Err(NoHead::Closed),
        Err(_) if state.is_head_full() => Err(NoHead::Refused(Refusal::HeadersTooLarge)),
        Err(error) => Err(refused(&error)),
    }
}

pub(super) fn too_many() -> Refusal {
    Refusal::Shed { reason: ShedReason::Connections, retry_after: RETRY_AFTER_MIN.as_secs() }
}

fn refused(error: &pingora::Error) -> NoHead {
    if *error.etype() != pingora::ErrorType::InvalidHTTPHeader {
        return NoHead::Closed;
    }
    let text = error.to_string();
    let large = ["larger than", "TooManyHeaders", "too many headers"].iter().any(|sign| text.contains(sign));
    NoHead::Refused(if large { Refusal::HeadersTooLarge } else { invalid("the request line or a header is malformed") })
}

/// Checks framing and host. `may_upgrade`: whether the path can become a WebSocket.
pub(super) fn check(session: &ServerSession, may_upgrade: bool) -> Result<(), Refusal> {
    let request = session.req_header();
    if request.method == Method::CONNECT {
        return Err(Refusal::UpgradeRefused);
    }
    check_host(request)?;
    let mut lengths = request.headers.get_all(CONTENT_LENGTH).iter();
    if lengths.next().is_some_and(|length| lengths.next().is_some() || length.as_bytes().contains(&b',')) {
        return Err(invalid("Content-Length was sent twice; send it once"));
    }
    if request.headers.contains_key(TRANSFER_ENCODING) {
        check_coding(&request.headers)?;
        if is_framed_twice(session) {
            return Err(invalid("both Content-Length and Transfer-Encoding were sent; send one of them"));
        }
    }
    let web_socket = |value: &[u8]| value.trim_ascii().eq_ignore_ascii_case(b"websocket");
    if !may_upgrade
        && session.is_upgrade_req()
        && request.headers.get_all(UPGRADE).iter().any(|value| web_socket(value.as_bytes()))
    {
        return Err(Refusal::UpgradeRefused);
    }
    Ok(())
}

fn check_host(request: &RequestHeader) -> Result<(), Refusal> {
    // pingora has already refused a request with several Host headers, or with one that differs
    // from an absolute request target.
    match request.headers.get(HOST) {
        None if request.version == Version::HTTP_11 => Err(invalid("an HTTP/1.1 request must have a Host header")),
        Some(host) if host.is_empty() || !host.as_bytes().iter().all(|&byte| is_host(byte)) => {
            Err(invalid("the Host header is invalid"))
        }
        _ => Ok(()),
    }
}

/// Non-ASCII bytes are accepted, as by nginx.
fn is_host(byte: u8) -> bool {
    byte > b' ' && byte != 0x7f && !b"/\\?#@\"<>".contains(&byte)
}

fn check_coding(headers: &HeaderMap) -> Result<(), Refusal> {
    let values = headers.get_all(TRANSFER_ENCODING).iter();
    let codings = values.flat_map(|value| value.as_bytes().split(|&byte| byte == b',')).map(<[u8]>::trim_ascii);
    let (chunked, other): (Vec<_>, Vec<_>) = codings.partition(|coding| coding.eq_ignore_ascii_case(b"chunked"));
    match (chunked.len(), other.is_empty()) {
        (1, true) => Ok(()),
        (_, true) => Err(invalid("Transfer-Encoding names chunked twice; send it once")),
        _ => Err(Refusal::CodingNotSupported),
    }
}

/// Whether a request has both a length and a transfer coding.
///
/// RFC 9112 (6.3) allows a server to refuse such a request or to use the chunks. The gateway
/// refuses, as nginx does, because a proxy in front of it may have used the length (request
/// smuggling). pingora removes the length from the parsed headers, so the raw bytes are searched.
fn is_framed_twice(session: &ServerSession) -> bool {
    let Some(session) = session.as_http1() else { return false };
    let name = CONTENT_LENGTH.as_str().as_bytes();
    let head = session.get_headers_raw_bytes();
    head.split(|byte| *byte == b'\n').any(|line| {
        line.split_at_checked(name.len())
            .is_some_and(|(start, rest)| start.eq_ignore_ascii_case(name) && rest.trim_ascii_start().starts_with(b":"))
    })
}

fn invalid(message: &str) -> Refusal {
    Refusal::BadRequest { message: message.to_owned(), param: None }
}
