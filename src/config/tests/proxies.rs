//! `server.trusted_proxies` and `server.proxy_protocol`: accepted and refused values.
//!
//! A refused range must give a message with the range to write instead. By default no peer is
//! trusted.

use super::problems::one_in;
use super::{TWO_POOLS, read, read_with};

#[test]
fn ranges_are_refused_with_what_to_write() {
    let wrong = |set: &str, path: &str, part: &str| one_in(TWO_POOLS, &[set], path, part);
    wrong(r#"server.trusted_proxies=["proxy"]"#, "server.trusted_proxies[0]", "not a range of addresses");
    wrong(r#"server.trusted_proxies=["10.1.2.3/8"]"#, "server.trusted_proxies[0]", "write \"10.0.0.0/8\"");
    wrong("server.trusted_proxies=10.0.0.0/8", "server.trusted_proxies", "expected a list");
    wrong("server.proxy_protocol=true", "server.proxy_protocol", "no one may send a PROXY header");
}

#[test]
fn no_one_is_trusted_unless_the_configuration_says_so() {
    let address = "10.1.2.3".parse().unwrap();
    assert!(!read(TWO_POOLS).unwrap().config.server.is_trusted_proxy(address));
    let sets = [r#"server.trusted_proxies=["192.0.2.1", "10.0.0.0/8"]"#, "server.proxy_protocol=true"];
    let server = read_with(TWO_POOLS, &sets).unwrap().config.server;
    assert!(server.is_trusted_proxy(address) && server.proxy_protocol);
}
