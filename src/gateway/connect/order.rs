//! The order in which the addresses of a name are tried: RFC 8305, section 4.
//!
//! The resolver sorts by RFC 6724. The first address stays first; then the families alternate, so
//! that a family without a route costs one attempt. Addresses that failed lately come last.

use std::net::SocketAddr;

/// `addresses` with alternating families; addresses for which `is_avoided` holds come last.
pub(super) fn interleaved(addresses: &[SocketAddr], is_avoided: impl Fn(&SocketAddr) -> bool) -> Vec<SocketAddr> {
    let Some(first) = addresses.first() else { return Vec::new() };
    let family =
        |is_first: bool| addresses.iter().filter(move |other| (other.is_ipv6() == first.is_ipv6()) == is_first);
    let (mut one, mut other) = (family(true), family(false));
    let mut ordered = Vec::with_capacity(addresses.len());
    loop {
        let pair = [one.next(), other.next()];
        if pair == [None, None] {
            break;
        }
        ordered.extend(pair.into_iter().flatten());
    }
    // The sort is stable, so it keeps the order within both parts.
    ordered.sort_by_key(|address| is_avoided(address));
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockets(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| SocketAddr::new(text.parse().unwrap(), 80)).collect()
    }

    #[test]
    fn families_alternate_and_the_resolver_s_first_address_stays_first() {
        let found = sockets(&["::1", "::2", "::3", "10.0.0.1", "10.0.0.2"]);
        assert_eq!(interleaved(&found, |_| false), sockets(&["::1", "10.0.0.1", "::2", "10.0.0.2", "::3"]));
        let found = sockets(&["10.0.0.1", "10.0.0.2", "::1"]);
        assert_eq!(interleaved(&found, |_| false), sockets(&["10.0.0.1", "::1", "10.0.0.2"]));
        assert_eq!(interleaved(&sockets(&["::1", "::2"]), |_| false), sockets(&["::1", "::2"]));
        assert_eq!(interleaved(&[], |_| false), []);
    }

    #[test]
    fn addresses_that_failed_come_last() {
        let found = sockets(&["::1", "10.0.0.1", "::2", "10.0.0.2"]);
        let avoided = sockets(&["::1", "10.0.0.2"]);
        let ordered = interleaved(&found, |address| avoided.contains(address));
        assert_eq!(ordered, sockets(&["10.0.0.1", "::2", "::1", "10.0.0.2"]));
    }
}
