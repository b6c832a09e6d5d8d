//! The origin of a request, by which outcomes count as evidence: an API key, or a network of
//! clients without keys.
//!
//! Outcomes of one origin say little about an engine or an arm, because the requests themselves may
//! be the cause. So ejection, guardrails and estimates count by distinct origins. An origin is a
//! hash with a key that each process draws, so that no client can imitate another one, and no
//! address or name is kept. Behind a NAT or a proxy many clients are one origin, unless a trusted
//! proxy names them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::LazyLock;

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The origin of a request. The default is the unknown origin, which counts as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin(u64);

impl Origin {
    /// The origin of all requests with the API key of this name.
    pub fn of_key(name: &str) -> Self {
        Self(HASHER.hash_one(name).max(1))
    }

    /// The origin of requests without a key from this network: an IPv4 address, or a prefix of
    /// IPv6.
    pub fn of_network(network: IpAddr) -> Self {
        // One word, because each request is hashed; a name has another length.
        let address = match network {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Self(HASHER.hash_one(u128::from(address)).max(1))
    }

    /// Whether the origin is known.
    pub fn is_known(self) -> bool {
        self != Self::default()
    }

    /// The hash, for tables that use another key type; 0 if unknown.
    pub fn bits(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_networks_are_distinct_and_stable_within_a_process() {
        let address: IpAddr = [127, 0, 0, 1].into();
        let other: IpAddr = [127, 0, 0, 2].into();
        let all = [Origin::of_key("a"), Origin::of_key("b"), Origin::of_network(address), Origin::of_network(other)];
        for (number, origin) in all.iter().enumerate() {
            assert!(origin.is_known() && !all[..number].contains(origin));
        }
        assert_eq!(Origin::of_key("a"), all[0]);
        assert!(!Origin::default().is_known());
    }
}
