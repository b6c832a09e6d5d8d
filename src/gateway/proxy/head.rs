//! The head of a request: read within its own deadline and bound, and checked where pingora is too lenient.
//!
//! A connection may be idle for `server.keepalive`. From the first byte of a request on, its head has
//! `server.header_timeout` in all, and [`HEAD_BYTES_MAX`]; pingora by itself counts silence only, and up to 1 MiB.
//!
//! What is checked here decides where a request ends or to whom it is addressed. A request that fails is refused and its
//! connection closed, since it is not known where the next request begins:
//!
//! | request | response | as |
//! |---|---|---|
//! | HTTP/1.1 without `Host`, or an invalid one | 400 | RFC 9112 3.2, nginx |
//! | two lengths, even if they are the same; a length and a transfer coding | 400 | nginx |
//! | `Transfer-Encoding` with a coding other than `chunked` | 501 | RFC 9112 6.1, nginx |
//! | `chunked` twice | 400 | RFC 9112 6.1 (nginx: 501) |
//! | CONNECT | 501 | RFC 9110 9.1 (nginx: 400 or 405) |
//! | upgrade to a WebSocket | 501 | its client cannot go on without |
//!
//! Every other `Upgrade` is ignored, as RFC 9110 (7.8) allows and as nginx and HAProxy do: some clients offer HTTP/2 with
//! each request.

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

use super::socket::ClientHandle;
use crate::config::limits::MAX_HEADER_BYTES;
use sluice_core::openai::Refusal;

/// Bytes of a head that are read, the request line and separators included; headers have a bound of their own.
const HEAD_BYTES_MAX: usize = MAX_HEADER_BYTES + (16 << 10);

/// How long a connection that will be refused may take to send its request.
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

/// Why there is no request to serve.
#[derive(Debug)]
pub(super) enum NoHead {
    /// The client closed or was idle for too long, or the gateway stops.
    Closed,
    /// What arrived is refused.
    Refused(Refusal),
}

/// Reads the head of the next request.
pub(super) async fn read(session: &mut ServerSession, times: HeadTimes, stop: &ShutdownWatch) -> Result<(), NoHead> {
    let Some(state) = ClientHandle::of(session).map(|client| Arc::clone(client.state)) else {
        // A request of HTTP/2 begins with its head, and its connection has deadlines of its own.
        return if matches!(session.read_request().await, Ok(true)) { Ok(()) } else { Err(NoHead::Closed) };
    };
    let times = if state.is_refused() { times.at_most(REFUSED_TIME) } else { times };
    state.limit_head(HEAD_BYTES_MAX);
    let mut stop = stop.clone();
    let mut timer = pin!(sleep(times.idle));
    let mut begun = false;
    let read = {
        let mut reading = pin!(session.read_request());
        loop {
            // Bytes are read while `reading` is polled, so the flag is looked at in the same turn.
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
                // Until a request is complete a connection is closed at once when the gateway stops.
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

/// What to do about a head that pingora could not read.
fn refused(error: &pingora::Error) -> NoHead {
    if *error.etype() != pingora::ErrorType::InvalidHTTPHeader {
        return NoHead::Closed;
    }
    let text = error.to_string();
    let large = ["larger than", "TooManyHeaders", "too many headers"].iter().any(|sign| text.contains(sign));
    NoHead::Refused(if large { Refusal::HeadersTooLarge } else { invalid("the request line or a header is malformed") })
}

/// Checks what decides where the request ends and to whom it is addressed.
pub(super) fn check(session: &ServerSession) -> Result<(), Refusal> {
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
    if session.is_upgrade_req() && request.headers.get_all(UPGRADE).iter().any(|value| web_socket(value.as_bytes())) {
        return Err(Refusal::UpgradeRefused);
    }
    Ok(())
}

fn check_host(request: &RequestHeader) -> Result<(), Refusal> {
    // pingora has refused two of them, and one that differs from an absolute target.
    match request.headers.get(HOST) {
        None if request.version == Version::HTTP_11 => Err(invalid("an HTTP/1.1 request must have a Host header")),
        Some(host) if host.is_empty() || !host.as_bytes().iter().all(|&byte| is_host(byte)) => {
            Err(invalid("the Host header is invalid"))
        }
        _ => Ok(()),
    }
}

/// Bytes of a host or a port. Those of other alphabets are let through, as by nginx.
fn is_host(byte: u8) -> bool {
    byte > b' ' && byte != 0x7f && !b"/\\?#@\"<>".contains(&byte)
}

/// The only transfer coding of requests is `chunked`, once.
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

/// Whether a request says twice, and so perhaps differently, where its body ends.
///
/// RFC 9112 (6.3) leaves a server the choice between refusing it and believing the chunks. We refuse, as nginx does:
/// a proxy in front of the gateway may have used the length. pingora drops the length from the parsed headers, so it
/// is looked for in the bytes.
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
