//! Which headers pass from one side to the other.
//!
//! Hop-by-hop headers belong to one connection (RFC 9110, 7.6.1): `Connection` and what it names, and
//! the fixed list below. `Host` and framing (`Content-Length`, `Transfer-Encoding`) are written anew on
//! each side. `Expect` was answered here. `Accept-Encoding` is not passed on: engines answer in plain
//! text by default, and a compressed stream could neither be metered nor have an event taken out.
//! `X-Data-Parallel-Rank` chooses an engine core inside a backend; it is for a router that knows their load, and a client
//! could put all its work on one core with it, so it stops here.
//!
//! Request ids: the client gets its own id back, and the engine gets one that is unique. vLLM before 0.14 confuses
//! two running requests of one id, and a client may send one id twice. What the engine gets begins with the client's id.
//!
//! Credentials: with keys configured, what the client sent was for us and goes no further; without,
//! it is for the engine, and Anthropic's `x-api-key` is translated to the bearer token that vLLM reads.

use std::sync::Arc;

use http::HeaderMap;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};

use crate::config::limits;
use sluice_core::base::Rng;
use sluice_core::openai::ErrorFormat;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const X_DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// Headers of one connection only.
const HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Takes out what belongs to one connection only.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
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
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Whether a request has more or longer headers than are served here; pingora's own bounds are looser.
pub(super) fn too_large(headers: &HeaderMap) -> bool {
    let bytes = || headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    headers.len() > limits::MAX_HEADERS || bytes() > limits::MAX_HEADER_BYTES
}

/// What of a request's headers goes to an engine.
pub(super) fn for_engine(mut headers: HeaderMap, ours: bool) -> HeaderMap {
    remove_hop_by_hop(&mut headers);
    for name in [HOST, CONTENT_LENGTH, EXPECT, ACCEPT_ENCODING, X_DATA_PARALLEL_RANK] {
        headers.remove(name);
    }
    let api_key = headers.remove(X_API_KEY);
    if ours {
        headers.remove(AUTHORIZATION);
    } else if let Some(key) = api_key
        && !headers.contains_key(AUTHORIZATION)
        && let Ok(bearer) = HeaderValue::from_maybe_shared([b"Bearer ", key.as_bytes()].concat())
    {
        headers.insert(AUTHORIZATION, bearer);
    }
    headers
}

/// The API key a client sent: a bearer token, or Anthropic's header.
pub(super) fn client_key(headers: &HeaderMap) -> Option<String> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
    });
    let anthropic = || headers.get(X_API_KEY).and_then(|value| value.to_str().ok()).map(str::to_owned);
    bearer.or_else(anthropic).filter(|key| !key.is_empty())
}

/// The shape of errors that a client expects which has sent these headers to this path: Anthropic's clients send a version
/// with every request, to whatever path.
pub(super) fn error_format(headers: &HeaderMap, path: &str) -> ErrorFormat {
    let is_anthropic = headers.contains_key(ANTHROPIC_VERSION) || path.starts_with("/v1/messages");
    if is_anthropic { ErrorFormat::Anthropic } else { ErrorFormat::OpenAi }
}

/// The ids of one request.
#[derive(Clone, Debug)]
pub(super) struct RequestIds {
    /// Returned to the client.
    pub(super) client: Arc<str>,
    /// Sent upstream; no other request has it.
    pub(super) upstream: Arc<str>,
}

/// The client's request id if it is usable as one, else a new one: 32 hex digits, fixed by a seed of this process
/// and the number of the request in it. Upstream the client's id has 16 such digits behind it.
///
/// Usable: up to [`limits::MAX_REQUEST_ID_BYTES`] visible ASCII characters without quotes, so that it
/// can go into headers and log lines as it is.
pub(super) fn request_ids(headers: &HeaderMap, seed: u64, number: u64) -> RequestIds {
    let usable = |id: &&str| {
        let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\';
        !id.is_empty() && id.len() <= limits::MAX_REQUEST_ID_BYTES && id.bytes().all(plain)
    };
    let unique = Rng::new(!seed ^ number).next_u64();
    match headers.get(X_REQUEST_ID).and_then(|value| value.to_str().ok()).filter(usable) {
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
    fn credentials_for_us_stop_here_and_those_for_the_engine_pass() {
        let sent = [("authorization", "Bearer k"), ("host", "gate"), ("content-length", "9"), ("accept", "*/*")];
        assert_eq!(for_engine(headers(&sent), true), headers(&[("accept", "*/*")]));
        assert_eq!(for_engine(headers(&sent), false), headers(&[("authorization", "Bearer k"), ("accept", "*/*")]));
    }

    #[test]
    fn anthropics_key_header_becomes_the_bearer_token_that_vllm_reads() {
        assert_eq!(for_engine(headers(&[("x-api-key", "k")]), false), headers(&[("authorization", "Bearer k")]));
        assert_eq!(client_key(&headers(&[("x-api-key", "k")])).as_deref(), Some("k"));
        assert_eq!(client_key(&headers(&[("authorization", "bearer  k2")])).as_deref(), Some("k2"));
        assert_eq!(client_key(&headers(&[("authorization", "Basic abc")])), None);
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
    fn a_client_does_not_choose_the_engine_core() {
        assert_eq!(
            for_engine(headers(&[("x-data-parallel-rank", "0"), ("accept", "*/*")]), true),
            headers(&[("accept", "*/*")])
        );
    }

    #[test]
    fn anthropics_clients_get_errors_in_their_shape_on_every_path() {
        let version = headers(&[("anthropic-version", "2023-06-01")]);
        assert_eq!(error_format(&version, "/v1/files"), ErrorFormat::Anthropic);
        assert_eq!(error_format(&headers(&[]), "/v1/messages/batches"), ErrorFormat::Anthropic);
        assert_eq!(error_format(&headers(&[]), "/v1/files"), ErrorFormat::OpenAi);
    }
}
