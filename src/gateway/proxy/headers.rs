//! Decides which headers are forwarded, and reads ids, keys and priority from headers.
//!
//! Hop-by-hop headers belong to one connection (RFC 9110, 7.6.1): `Connection`, the headers that it
//! names, and the list below. Also not forwarded: `Host` and framing, which are set anew on each
//! side; `Expect` and `Content-Encoding`, which the gateway handles; `Accept-Encoding`, because a
//! compressed stream can be neither metered nor edited; `X-Data-Parallel-Rank` and
//! `X-Vllm-Priority`, with which a client could overload one engine core or go before all others.
//!
//! The engine gets a unique request id that begins with the client's, because vLLM before 0.14
//! mixes up two running requests with the same id.
//!
//! A client may send several credentials. The first that is a key of the gateway counts, in this
//! order: bearer tokens in `Authorization`, `x-api-key` (Anthropic), `api-key` (Azure). With
//! configured keys, no credential is forwarded. Otherwise, if `Authorization` is missing,
//! `x-api-key` or `api-key` becomes the bearer token that vLLM reads.

use std::sync::Arc;

use http::HeaderMap;
use http::header::{AUTHORIZATION, CONNECTION, HeaderName, HeaderValue};
use smallvec::SmallVec;

use crate::flow::keys::{ApiKey, KeyError};
use crate::flow::{PRIORITY, RequestTrace, RoutingTable};
use sluice_config::{Config, limits};
use sluice_core::base::{Rng, hash_two};
use sluice_core::openai::{ErrorFormat, Refusal, invocation};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const NO_CONTINUE: HeaderName = HeaderName::from_static("x-sluice-no-continue");
const X_VLLM_PRIORITY: HeaderName = HeaderName::from_static(PRIORITY);
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

pub(super) const CREDENTIALS: [HeaderName; 3] = [AUTHORIZATION, X_API_KEY, API_KEY];
/// The most credentials of a request that are looked up; each is hashed once.
const CREDENTIALS_MAX: usize = 8;

fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "http2-settings"
    )
}

/// Whether a header is set anew for the engine, was handled by the gateway, or is refused.
fn is_own(name: &str) -> bool {
    matches!(
        name,
        "host" | "content-length" | "content-encoding" | "expect" | "accept-encoding" | "x-data-parallel-rank"
    )
}

pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    remove_named_by_connection(headers);
    remove_where(headers, is_hop_by_hop);
}

fn remove_named_by_connection(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
}

/// Few of the names are there, and comparing all costs less than hashing each.
fn remove_where(headers: &mut HeaderMap, is_removed: impl Fn(&str) -> bool) {
    let named = headers.keys().filter(|name| is_removed(name.as_str()));
    for name in named.cloned().collect::<SmallVec<[HeaderName; 8]>>() {
        headers.remove(name);
    }
}

/// Whether there are more headers, or more bytes of headers, than allowed. pingora's limits are
/// higher.
pub(super) fn too_large(headers: &HeaderMap) -> bool {
    let bytes = || headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    headers.len() > limits::MAX_HEADERS || bytes() > limits::MAX_HEADER_BYTES
}

/// The headers that are forwarded to an engine; with `keys_configured`, no credentials.
pub(super) fn for_engine(mut headers: HeaderMap, keys_configured: bool) -> HeaderMap {
    remove_named_by_connection(&mut headers);
    remove_where(&mut headers, |name| is_hop_by_hop(name) || is_own(name));
    if keys_configured {
        for name in CREDENTIALS {
            headers.remove(name);
        }
    } else if !headers.contains_key(AUTHORIZATION)
        && let Some(key) = take(&mut headers, X_API_KEY).or_else(|| take(&mut headers, API_KEY))
        && let Ok(bearer) = HeaderValue::from_maybe_shared([b"Bearer ", key.as_bytes()].concat())
    {
        headers.insert(AUTHORIZATION, bearer);
    }
    headers
}

/// Takes the priority in `X-Vllm-Priority`, as vLLM reads it: the first value counts, unless it is
/// not an integer. Numbers beyond 64 bits are clamped.
pub(super) fn take_priority(headers: &mut HeaderMap) -> Option<i64> {
    let value = take(headers, X_VLLM_PRIORITY)?;
    let text = value.to_str().ok()?.trim();
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    // Python allows an underscore between two digits.
    let is_number = digits.split('_').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    if !is_number {
        return None;
    }
    let digits = digits.bytes().filter(u8::is_ascii_digit).map(|byte| i64::from(byte - b'0'));
    Some(digits.fold(0_i64, |number, digit| {
        let number = number.saturating_mul(10);
        if is_negative { number.saturating_sub(digit) } else { number.saturating_add(digit) }
    }))
}

/// Takes the header with which a client declines a continuation by another engine. Returns whether
/// it was there.
pub(super) fn take_no_continue(headers: &mut HeaderMap) -> bool {
    take(headers, NO_CONTINUE).is_some()
}

/// Takes a header that is rarely there: comparing a few names costs less than hashing one.
fn take(headers: &mut HeaderMap, name: HeaderName) -> Option<HeaderValue> {
    headers.keys().any(|other| *other == name).then(|| headers.remove(name)).flatten()
}

fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token)
}

/// The client's keys, in the order in which they are tried.
pub(super) fn client_keys(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = |name| headers.get_all(name).iter().filter_map(|value: &HeaderValue| value.to_str().ok());
    let plain = values(X_API_KEY).chain(values(API_KEY));
    let keys = values(AUTHORIZATION).filter_map(bearer).chain(plain).map(str::trim);
    keys.filter(|key| !key.is_empty()).take(CREDENTIALS_MAX)
}

/// The client's key; `None` if none is required.
pub(super) fn authenticate(headers: &HeaderMap, table: &RoutingTable) -> Result<Option<ApiKey>, Refusal> {
    if !table.keys.is_required() {
        return Ok(None);
    }
    table.keys.authenticate(client_keys(headers)).map_err(|error| match error {
        KeyError::Missing => Refusal::NoKey,
        KeyError::Unknown => Refusal::BadKey,
    })
}

/// Refuses headers by which an engine would replace the checked model.
pub(super) fn check_invocation(headers: &HeaderMap) -> Result<(), Refusal> {
    match invocation::ADAPTER_HEADERS.into_iter().find(|name| headers.contains_key(*name)) {
        None => Ok(()),
        Some(name) => {
            let message = format!("the header {name} is not supported; name the adapter in 'model'");
            Err(Refusal::BadRequest { message, param: None })
        }
    }
}

/// The format of errors. Anthropic's clients send `anthropic-version` with every request, whatever
/// the path.
pub(super) fn error_format(headers: &HeaderMap, path: &str) -> ErrorFormat {
    let is_anthropic = headers.contains_key(ANTHROPIC_VERSION) || path.starts_with("/v1/messages");
    if is_anthropic { ErrorFormat::Anthropic } else { ErrorFormat::OpenAi }
}

pub(super) fn trace(headers: &HeaderMap, config: &Config, seed: u64, number: u64) -> Option<Box<RequestTrace>> {
    let share = config.tracing.as_ref().map(|tracing| tracing.sample);
    RequestTrace::of(headers, share, || Rng::new(hash_two(seed, number)))
}

#[derive(Clone, Debug)]
pub(super) struct RequestIds {
    pub(super) client: Arc<str>,
    pub(super) upstream: Arc<str>,
}

/// The client's id if it is valid, with 16 more hex digits as the upstream id. Otherwise both ids
/// are 32 hex digits from the seed of this process and the number of the request.
///
/// Valid: up to [`limits::MAX_REQUEST_ID_BYTES`] visible ASCII characters without quotes and
/// backslashes, so that it needs no escaping in headers and log lines.
pub(super) fn request_ids(headers: &HeaderMap, seed: u64, number: u64) -> RequestIds {
    let valid = |id: &&str| {
        let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\';
        !id.is_empty() && id.len() <= limits::MAX_REQUEST_ID_BYTES && id.bytes().all(plain)
    };
    let unique = Rng::new(!seed ^ number).next_u64();
    match headers.get(X_REQUEST_ID).and_then(|value| value.to_str().ok()).filter(valid) {
        Some(id) => RequestIds { client: id.into(), upstream: format!("{id}-{:016x}", unique).into() },
        None => {
            let id: Arc<str> = format!("{:016x}{unique:016x}", Rng::new(seed).next_u64()).into();
            RequestIds { client: Arc::clone(&id), upstream: id }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn what_connection_names_goes_no_further() {
        let mut map =
            headers(&[("connection", "close, x-secret"), ("x-secret", "1"), ("te", "trailers"), ("x-kept", "2")]);
        remove_hop_by_hop(&mut map);
        assert_eq!(map, headers(&[("x-kept", "2")]));
    }

    #[test]
    fn credentials_for_the_gateway_are_removed_and_those_for_the_engine_forwarded() {
        let sent = [("authorization", "Bearer k"), ("host", "gate"), ("content-length", "9"), ("accept", "*/*")];
        assert_eq!(for_engine(headers(&sent), true), headers(&[("accept", "*/*")]));
        assert_eq!(for_engine(headers(&sent), false), headers(&[("authorization", "Bearer k"), ("accept", "*/*")]));
    }

    #[test]
    fn anthropics_key_header_becomes_the_bearer_token_that_vllm_reads() {
        assert_eq!(for_engine(headers(&[("x-api-key", "k")]), false), headers(&[("authorization", "Bearer k")]));
        assert_eq!(for_engine(headers(&[("api-key", "k")]), false), headers(&[("authorization", "Bearer k")]));
        let both = [("authorization", "Bearer k"), ("x-api-key", "other")];
        assert_eq!(for_engine(headers(&both), false), headers(&both));
    }

    #[test]
    fn every_key_that_a_client_sends_is_tried_in_a_fixed_order() {
        let sent = [
            ("api-key", "azure"),
            ("x-api-key", " anthropic"),
            ("authorization", "bearer  token"),
            ("authorization", "Basic abc"),
            ("authorization", "Bearer second"),
            ("x-api-key", ""),
        ];
        let mut map = HeaderMap::new();
        for (name, value) in sent {
            map.append(name, HeaderValue::from_static(value));
        }
        assert_eq!(client_keys(&map).collect::<Vec<_>>(), ["token", "second", "anthropic", "azure"]);
        assert_eq!(client_keys(&headers(&[("authorization", "Basic abc")])).next(), None);
        for _ in 0..50 {
            map.append("authorization", HeaderValue::from_static("Bearer x"));
        }
        assert_eq!(client_keys(&map).count(), CREDENTIALS_MAX);
    }

    #[test]
    fn no_credential_reaches_an_engine_where_the_gateway_has_keys() {
        let sent = [("authorization", "Bearer k"), ("x-api-key", "k"), ("api-key", "k"), ("accept", "*/*")];
        assert_eq!(for_engine(headers(&sent), true), headers(&[("accept", "*/*")]));
    }

    #[test]
    fn a_request_id_is_kept_if_it_can_stand_in_a_log_line() {
        let sent = headers(&[("x-request-id", "req-7")]);
        assert_eq!(&*request_ids(&sent, 1, 2).client, "req-7");
        let replaced = request_ids(&headers(&[("x-request-id", "a b")]), 1, 2);
        assert_eq!((replaced.client.len(), &replaced.upstream), (32, &replaced.client));
        assert_ne!(replaced.client, request_ids(&headers(&[]), 1, 3).client);
    }

    #[test]
    fn the_same_id_sent_twice_is_two_ids_upstream() {
        let sent = headers(&[("x-request-id", "req-7")]);
        let (one, two) = (request_ids(&sent, 1, 2), request_ids(&sent, 1, 3));
        assert_eq!(one.client, two.client);
        assert_ne!(one.upstream, two.upstream);
        assert!(one.upstream.starts_with("req-7-") && one.upstream.len() == 22);
    }

    #[test]
    fn the_header_that_declines_continuation_stays_at_the_gateway() {
        let mut sent = headers(&[("x-sluice-no-continue", "1"), ("accept", "*/*")]);
        assert!(take_no_continue(&mut sent) && !take_no_continue(&mut sent));
        assert_eq!(sent, headers(&[("accept", "*/*")]));
    }

    #[test]
    fn a_client_does_not_choose_the_engine_core() {
        assert_eq!(
            for_engine(headers(&[("x-data-parallel-rank", "0"), ("accept", "*/*")]), true),
            headers(&[("accept", "*/*")])
        );
    }

    #[test]
    fn the_header_for_priorities_is_read_as_vllm_does_and_not_forwarded() {
        let mut sent = headers(&[("x-vllm-priority", "-5"), ("accept", "*/*")]);
        assert_eq!(take_priority(&mut sent), Some(-5));
        assert_eq!(for_engine(sent, false), headers(&[("accept", "*/*")]));
        for (value, read) in [
            (" +1_000 ", Some(1_000)),
            ("-99999999999999999999", Some(i64::MIN)),
            ("99999999999999999999", Some(i64::MAX)),
            ("1.0", None),
            ("", None),
            ("-", None),
            ("_1", None),
            ("1__0", None),
            ("0x10", None),
        ] {
            assert_eq!(take_priority(&mut headers(&[("x-vllm-priority", value)])), read, "{value}");
        }
    }

    #[test]
    fn anthropics_clients_get_errors_in_their_shape_on_every_path() {
        let version = headers(&[("anthropic-version", "2023-06-01")]);
        assert_eq!(error_format(&version, "/v1/files"), ErrorFormat::Anthropic);
        assert_eq!(error_format(&headers(&[]), "/v1/messages/batches"), ErrorFormat::Anthropic);
        assert_eq!(error_format(&headers(&[]), "/v1/files"), ErrorFormat::OpenAi);
    }
}
