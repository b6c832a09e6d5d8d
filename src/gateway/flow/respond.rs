//! Sends the gateway's own refusals, and adds the gateway's headers to every response.
//!
//! `openai::error` maps refusals to HTTP. The gateway's headers replace headers of the engine with
//! the same name, so the client gets its own request id back. Only `Server-Timing` is added to the
//! engine's header.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{ACCEPT_ENCODING, ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, StatusCode};

use super::exchange::{Downstream, ResponseHead};
use super::record::{Outcome, Record, RecordGuard, Recorder};
use sluice_config::limits::RETRY_AFTER_MIN;
use sluice_core::openai::error::sse_error;
use sluice_core::openai::{ErrorFormat, Refusal, ShedReason};

/// The id of the request: the client's id if it sent a valid one.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(super) const BACKEND: HeaderName = HeaderName::from_static("x-sluice-backend");
pub(super) const POOL: HeaderName = HeaderName::from_static("x-sluice-pool");
/// The code of an error of the gateway. Errors in Anthropic's shape have no other place for the
/// code, and an engine's error has no code.
pub const ERROR_CODE: HeaderName = HeaderName::from_static("x-sluice-error");
const ARM: HeaderName = HeaderName::from_static("x-sluice-arm");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Records the request as shed, and returns the refusal. `room_in`: time until a pool is expected
/// to have room.
pub(super) fn shed<R: Recorder>(reason: ShedReason, room_in: Duration, record: &mut RecordGuard<'_, R>) -> Refusal {
    record.outcome = Outcome::Shed(reason);
    // The speed at which a stopping gateway serves its queue says nothing about the gateway that
    // takes over.
    let retry_after = if reason == ShedReason::ShuttingDown { RETRY_AFTER_MIN } else { room_in };
    Refusal::Shed { reason, retry_after: whole_seconds(retry_after) }
}

/// Like [`shed`], for the reason that the gateway shuts down.
pub(super) fn shut_down<R: Recorder>(record: &mut RecordGuard<'_, R>) -> Refusal {
    shed(ShedReason::ShuttingDown, RETRY_AFTER_MIN, record)
}

/// Seconds for `Retry-After`, rounded up, because a client that returns too early is refused again.
pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Sends a refusal; as an event if the client has the head of a stream. Sets the outcome to
/// `Refused` if none was set before, and to `ClientGone` if the client has left meanwhile.
pub async fn refuse<D: Downstream, R: Recorder>(
    down: &mut D,
    refusal: &Refusal,
    format: ErrorFormat,
    record: &mut RecordGuard<'_, R>,
) {
    if record.outcome == Outcome::ClientGone {
        record.outcome = Outcome::Refused;
    }
    record.settle_in_flight();
    if record.outcome == Outcome::Refused {
        record.refused = Some(refusal.code());
    }
    let body = Bytes::from(refusal.body(format));
    if record.status.is_some() {
        if down.body(Bytes::from(sse_error(&body)), false).await.is_err() {
            record.outcome = Outcome::ClientGone;
        }
        return down.abort();
    }
    let mut headers = HeaderMap::with_capacity(7);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    headers.insert(ERROR_CODE, HeaderValue::from_static(refusal.code()));
    if let Some(seconds) = refusal.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    add_gateway_headers(&mut headers, record);
    if let Some(allow) = refusal.allow() {
        headers.insert(ALLOW, HeaderValue::from_static(allow));
    }
    if let Some(codings) = refusal.accept_encoding() {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(codings));
    }
    let status = StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let sent = async {
        down.head(ResponseHead { status, headers }).await?;
        down.body(body, true).await?;
        down.finish().await
    };
    match sent.await {
        Ok(()) => record.status = Some(status),
        Err(_) => record.outcome = Outcome::ClientGone,
    }
}

/// Completes the head of an engine's response for the client, and notes it in the record.
pub fn complete_head(head: &mut ResponseHead, record: &mut Record) {
    add_gateway_headers(&mut head.headers, record);
    record.status = Some(head.status);
}

pub(super) fn add_gateway_headers(headers: &mut HeaderMap, record: &Record) {
    let mut set = |name: HeaderName, text: Option<&str>| {
        if let Some(value) = text.and_then(|text| HeaderValue::from_str(text).ok()) {
            headers.insert(name, value);
        }
    };
    set(REQUEST_ID, Some(&record.request_id));
    set(BACKEND, record.backend.as_deref());
    set(POOL, record.pool.as_deref());
    set(ARM, record.arm.as_deref());
    let mut timing = BytesMut::with_capacity(TIMING_BYTES);
    for (name, time) in [
        ("estimate;dur=", record.estimate_time),
        (", queue;dur=", record.queue_wait),
        (", connect;dur=", record.connect_time),
    ] {
        timing.put_slice(name.as_bytes());
        put_millis(&mut timing, time);
    }
    if let Ok(value) = HeaderValue::from_maybe_shared(timing.freeze()) {
        headers.append(SERVER_TIMING, value);
    }
}

/// Bytes of `Server-Timing` if no time is above 100 s.
const TIMING_BYTES: usize = 72;

/// Writes milliseconds with three decimals. Every response has three of them; the formatter of the
/// standard library takes five times the instructions.
fn put_millis(out: &mut BytesMut, time: Duration) {
    let mut rest = time.as_secs() * 1_000_000 + u64::from(time.subsec_nanos() + 500) / 1_000;
    let mut text = [0; 24];
    let mut start = text.len();
    for place in 0.. {
        if place == 3 {
            start -= 1;
            text[start] = b'.';
        }
        start -= 1;
        text[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if place >= 3 && rest == 0 {
            break;
        }
    }
    out.put_slice(&text[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_have_three_decimals() {
        for (nanos, text) in [
            (0, "0.000"),
            (499, "0.000"),
            (500, "0.001"),
            (1_234_567, "1.235"),
            (10_000_000, "10.000"),
            (61_005_000_000, "61005.000"),
            (999_999_500, "1000.000"),
        ] {
            let mut out = BytesMut::new();
            put_millis(&mut out, Duration::from_nanos(nanos));
            assert_eq!(out, text);
        }
        let mut out = BytesMut::new();
        put_millis(&mut out, Duration::from_secs(18_000_000_000_000));
        assert_eq!(out, "18000000000000000.000");
    }
}
