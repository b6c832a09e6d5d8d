//! `[admin]`: the host names of the admin port, and the flags of engines that may be changed
//! through it.
//!
//! `server.admin` has the address of the port, `auth.admin_token` the token. With DNS rebinding, a
//! malicious page in the operator's browser can reach the port under the page's own host name, so
//! the port accepts only listed names. Only listed flags can be changed, because some flags make an
//! engine run code.

use std::net::SocketAddr;

use super::limits;
use super::problem::Situation;
use super::table::table;

table! {
    /// Host names of the admin port, and the flags of engines that may be changed through it. The
    /// address of the port is server.admin.
    #[derive(Default)]
    pub struct Admin {
        /// Host names under which clients reach the admin port, without a port, such as
        /// ["sluice.internal"]. Always accepted: localhost, loopback addresses, the address of
        /// server.admin, and every address if server.admin is 0.0.0.0 or [::].
        pub hosts: Vec<String> = default("[]").check(check_host).at_most(limits::MAX_ADMIN_HOSTS);
        /// Further flags of engines that a restart may change (sluice backend restart --set), by
        /// their full names: ["tensor-parallel-size"]. Flags of vLLM's scheduler and memory need no
        /// entry. Flags such as middleware, chat-template or trust-remote-code let every user of
        /// the admin port run code as the engine.
        pub flags: Vec<String> = default("[]").check(check_flag).at_most(limits::MAX_ADMIN_FLAGS);
    }
}

impl Admin {
    /// Whether a client may reach the admin port at `listen` by this `host` (a name or an address,
    /// without a port).
    pub fn accepts_host(&self, host: &str, listen: SocketAddr) -> bool {
        let host = host.trim_end_matches('.');
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let is_own = match bare.parse::<std::net::IpAddr>() {
            // An address needs no DNS, so only a page that this machine served can have the address
            // as origin.
            Ok(address) => {
                let address = address.to_canonical();
                address.is_loopback() || address == listen.ip().to_canonical() || listen.ip().is_unspecified()
            }
            Err(_) => bare.eq_ignore_ascii_case("localhost"),
        };
        is_own || self.hosts.iter().any(|name| name.trim_end_matches('.').eq_ignore_ascii_case(bare))
    }
}

fn check_host(name: &str) -> Result<(), Situation> {
    let fine = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let is_host = !name.is_empty() && (name.chars().all(fine) || name.parse::<std::net::IpAddr>().is_ok());
    if is_host { Ok(()) } else { Err(Situation::HostName { found: name.to_owned() }) }
}

/// Whether a text can be the name of a flag, without leading dashes.
fn check_flag(name: &str) -> Result<(), Situation> {
    let fine = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let is_flag = name.starts_with(|letter: char| letter.is_ascii_alphanumeric()) && name.chars().all(fine);
    if is_flag { Ok(()) } else { Err(Situation::FlagName { found: name.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_and_addresses_are_accepted() {
        let hosts = vec!["Gate.Example".to_owned(), "203.0.113.7".to_owned()];
        let admin = Admin { hosts, flags: Vec::new() };
        let accepts = |host: &str, listen: &str| admin.accepts_host(host, listen.parse().unwrap());
        for host in [
            "localhost",
            "LOCALHOST.",
            "127.0.0.1",
            "127.9.9.9",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "gate.example",
            "203.0.113.7",
        ] {
            assert!(accepts(host, "127.0.0.1:8081"), "{host}");
            assert!(accepts(host, "10.0.0.5:8081"), "{host}");
        }
        for host in
            ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "10.0.0.5", "[::]"]
        {
            assert!(!accepts(host, "127.0.0.1:8081"), "{host}");
        }
        assert!(accepts("10.0.0.5", "10.0.0.5:8081") && !accepts("10.0.0.6", "10.0.0.5:8081"));
        assert!(accepts("10.0.0.6", "0.0.0.0:8081") && accepts("[2001:db8::1]", "[::]:8081"));
        assert!(!accepts("evil.example", "0.0.0.0:8081"));
    }
}
