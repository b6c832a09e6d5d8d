//! Finds the client of a connection or request behind proxies.
//!
//! | source | believed from |
//! |---|---|
//! | the peer address of the connection | every client |
//! | PROXY header (`proxy_protocol.rs`) | `server.trusted_proxies`, with `server.proxy_protocol` |
//! | `X-Forwarded-For` | `server.trusted_proxies` |
//!
//! Each proxy appends the address from which it got the request. So the last address that is not a
//! trusted proxy is the client, and the client may have written everything before it. An entry that
//! is no address ends the search at the hop before. Bounds: [`HOPS_MAX`].
//!
//! Headers that are not believed are counted, and logged at most once in [`LOG_PAUSE`] for each
//! fault.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::telemetry::{PROXY_FAULTS, ProxyFault};
use sluice_config::Server;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// The most proxies in a row; more than four are rare.
const HOPS_MAX: usize = 16;
/// Pause between two log lines about the same fault.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// Counts headers about clients that were not believed.
#[derive(Debug, Default)]
pub(super) struct ProxyReports {
    counts: [AtomicU64; PROXY_FAULTS],
    logged: Mutex<[Option<Instant>; PROXY_FAULTS]>,
}

impl ProxyReports {
    pub(super) fn report(&self, fault: ProxyFault, from: IpAddr) {
        self.counts[fault as usize].fetch_add(1, Relaxed);
        let now = Instant::now();
        let is_due = {
            let last = &mut self.logged.lock()[fault as usize];
            let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= LOG_PAUSE);
            if is_due {
                *last = Some(now);
            }
            is_due
        };
        if is_due {
            tracing::warn!("{}", words(fault, from));
        }
    }

    pub(super) fn refused(&self) -> [u64; PROXY_FAULTS] {
        self.counts.each_ref().map(|count| count.load(Relaxed))
    }
}

fn words(fault: ProxyFault, from: IpAddr) -> String {
    match fault {
        ProxyFault::Untrusted => format!(
            "refused a connection with a PROXY header: {from} is not in server.trusted_proxies; add it if it is a proxy"
        ),
        ProxyFault::Missing => format!(
            "refused a connection without a PROXY header from {from}, which is in server.trusted_proxies; turn the \
             header on in the proxy, or server.proxy_protocol off"
        ),
        ProxyFault::Malformed => format!("refused a connection from {from}: its PROXY header is malformed"),
        ProxyFault::Timeout => {
            format!("refused a connection from {from}: its PROXY header did not arrive within server.header_timeout")
        }
        ProxyFault::Forwarded => format!(
            "ignored X-Forwarded-For of {from}, which is not in server.trusted_proxies; add it if it is a proxy"
        ),
    }
}

/// The client of a request with these headers on a connection from `from`.
pub(super) fn client(headers: &HeaderMap, from: IpAddr, server: &Server, reports: &ProxyReports) -> IpAddr {
    if server.trusted_proxies.is_empty() {
        return from;
    }
    if !server.is_trusted_proxy(from) {
        if headers.contains_key(X_FORWARDED_FOR) {
            reports.report(ProxyFault::Forwarded, from);
        }
        return from;
    }
    let values = headers.get_all(X_FORWARDED_FOR).iter().rev();
    let hops = values.flat_map(|value: &HeaderValue| value.as_bytes().rsplit(|byte| *byte == b','));
    let mut client = from;
    for hop in hops.take(HOPS_MAX).map_while(address) {
        client = hop;
        if !server.is_trusted_proxy(hop) {
            break;
        }
    }
    client
}

/// The address in an entry of `X-Forwarded-For`, which may have a port.
fn address(entry: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(entry).ok()?.trim();
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::super::clients::tests::server;
    use super::*;

    fn client_of(forwarded: &[&str], from: &str) -> String {
        let server = server(&["trusted_proxies=[\"10.0.0.0/8\", \"fd00::/8\"]"]);
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append(X_FORWARDED_FOR, HeaderValue::from_str(value).unwrap());
        }
        client(&headers, from.parse().unwrap(), &server, &ProxyReports::default()).to_string()
    }

    #[test]
    fn the_last_address_that_is_no_trusted_proxy_is_the_client() {
        for (forwarded, client) in [
            (&["192.0.2.1"][..], "192.0.2.1"),
            (&["203.0.113.9, 192.0.2.1, 10.0.0.7"], "192.0.2.1"),
            (&["203.0.113.9", "192.0.2.1", "10.0.0.7 , fd00::1"], "192.0.2.1"),
            (&["2001:db8::1"], "2001:db8::1"),
            (&["[2001:db8::1]:443"], "2001:db8::1"),
            (&["[2001:db8::1]"], "2001:db8::1"),
            (&["192.0.2.1:4711"], "192.0.2.1"),
            (&["::ffff:192.0.2.1"], "192.0.2.1"),
            (&["10.0.0.9"], "10.0.0.9"),
            (&[], "10.0.0.1"),
            (&[""], "10.0.0.1"),
            (&["unknown"], "10.0.0.1"),
            (&["192.0.2.1, \"<script>\", 10.0.0.7"], "10.0.0.7"),
        ] {
            assert_eq!(client_of(forwarded, "10.0.0.1"), client, "{forwarded:?}");
        }
        let long = ["192.0.2.1".to_owned(), vec!["10.0.0.7"; 1_000].join(",")].join(",");
        assert_eq!(client_of(&[&long], "10.0.0.1"), "10.0.0.7", "a bounded number of hops");
    }

    #[test]
    fn what_others_write_is_ignored_and_counted() {
        let from = "192.0.2.7".parse().unwrap();
        let (reports, mut headers) = (ProxyReports::default(), HeaderMap::new());
        headers.insert(X_FORWARDED_FOR, HeaderValue::from_static("10.9.9.9"));
        let trusting = server(&["trusted_proxies=[\"10.0.0.0/8\"]"]);
        assert_eq!(client(&headers, from, &trusting, &reports), from);
        assert_eq!(reports.refused()[ProxyFault::Forwarded as usize], 1);
        assert_eq!(client(&headers, from, &server(&[]), &reports), from);
        assert_eq!(reports.refused()[ProxyFault::Forwarded as usize], 1, "no one expects the header");
    }
}
