//! Metrics of client connections and request bodies, with their limits.
//!
//! The values are read from `proxy::ClientLimits` at scrape time. The limits are also metrics, so
//! that an alert does not depend on the configuration.

use super::exposition::Page;
use super::families::{self, Family};

/// Connections and bodies of all clients, and their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientView {
    /// Open connections, including ones that get a 503.
    pub connections: usize,
    /// Limit on connections that are served.
    pub connections_max: usize,
    /// Connections closed without a response, because too many were already waiting for a 503.
    pub dropped: u64,
    /// Bytes of request bodies in memory.
    pub body_bytes: u64,
    /// Limit on `body_bytes`.
    pub body_bytes_max: u64,
    /// Bytes of responses that wait for slow clients.
    pub response_bytes: u64,
    /// Limit on `response_bytes`.
    pub response_bytes_max: u64,
    /// TLS handshakes in progress.
    pub handshakes: usize,
    /// Connections without a request that were closed for other clients.
    pub connections_gave_way: u64,
    /// TLS handshakes that were ended for other clients.
    pub handshakes_gave_way: u64,
    /// Unfinished request bodies that were refused for other clients.
    pub bodies_gave_way: u64,
    /// Stored responses forgotten for other keys, or because there were too many.
    pub responses_gave_way: u64,
    /// Headers of proxies that were not believed, by [`ProxyFault`].
    pub proxy_headers_refused: [u64; PROXY_FAULTS],
}

/// The reason why a header that names a client is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyFault {
    /// A PROXY header from an address that is no trusted proxy.
    Untrusted,
    /// A trusted proxy sent no header.
    Missing,
    /// The header is malformed.
    Malformed,
    /// The header did not arrive in time.
    Timeout,
    /// `X-Forwarded-For` from an address that is no trusted proxy.
    Forwarded,
}

/// The number of faults.
pub const PROXY_FAULTS: usize = 5;
/// Label values, in the order of [`ProxyFault`].
const FAULTS: [&str; PROXY_FAULTS] = ["untrusted", "missing", "malformed", "timeout", "forwarded_untrusted"];

type Count = fn(&ClientView) -> u64;
/// Shared resources, and the counts of holdings that gave way.
const GAVE_WAY: [(&str, Count); 4] = [
    ("connections", |view| view.connections_gave_way),
    ("handshakes", |view| view.handshakes_gave_way),
    ("body_memory", |view| view.bodies_gave_way),
    ("stored_responses", |view| view.responses_gave_way),
];

type Value = fn(&ClientView) -> f64;
const VALUES: [(Family, Value); 8] = [
    (families::CLIENT_CONNECTIONS, |view| view.connections as f64),
    (families::CLIENT_CONNECTIONS_MAX, |view| view.connections_max as f64),
    (families::BODY_BYTES, |view| view.body_bytes as f64),
    (families::BODY_BYTES_MAX, |view| view.body_bytes_max as f64),
    (families::RESPONSE_BYTES, |view| view.response_bytes as f64),
    (families::RESPONSE_BYTES_MAX, |view| view.response_bytes_max as f64),
    (families::HANDSHAKES, |view| view.handshakes as f64),
    (families::CONNECTIONS_DROPPED, |view| view.dropped as f64),
];

pub(super) const FAMILIES: [Family; 10] = [
    families::CLIENT_CONNECTIONS,
    families::CLIENT_CONNECTIONS_MAX,
    families::BODY_BYTES,
    families::BODY_BYTES_MAX,
    families::RESPONSE_BYTES,
    families::RESPONSE_BYTES_MAX,
    families::HANDSHAKES,
    families::CONNECTIONS_DROPPED,
    families::SHARES_GAVE_WAY,
    families::PROXY_HEADERS_REFUSED,
];

pub(super) fn add(view: &ClientView, page: &mut Page) {
    for (family, read) in &VALUES {
        page.add(family, &[], read(view));
    }
    for (resource, read) in GAVE_WAY {
        page.add(&families::SHARES_GAVE_WAY, &[resource], read(view) as f64);
    }
    for (fault, count) in FAULTS.iter().zip(view.proxy_headers_refused) {
        page.add(&families::PROXY_HEADERS_REFUSED, &[fault], count as f64);
    }
}
