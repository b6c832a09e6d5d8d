//! Ranges of addresses: `server.trusted_proxies`.
//!
//! An address without a prefix length is a range of one address. An IPv4 range also matches IPv4
//! addresses that are written as IPv6 (`::ffff:10.1.2.3`), as a socket for both families reports
//! them.

use std::fmt;
use std::net::IpAddr;

use super::file::Entry;
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::Scalar;

/// Addresses with the same first bits, written `"10.0.0.0/8"`; a single address without prefix
/// length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    first: IpAddr,
    /// Number of bits that all addresses share.
    prefix: u8,
}

impl AddressRange {
    /// Whether an address is in the range. An IPv4 address that is written as IPv6 counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.first, address.to_canonical()) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                let differ = first.to_bits() ^ address.to_bits();
                differ.checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                let differ = first.to_bits() ^ address.to_bits();
                differ.checked_shr(128 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is not a range of addresses; write one such as \"10.0.0.0/8\" or \"10.1.2.3\"");
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => bits,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().ok().filter(|prefix| *prefix <= bits).ok_or_else(wrong)?
            }
            Some(_) => return Err(wrong()),
        };
        let first = match address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4((address.to_bits() & mask).into())
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6((address.to_bits() & mask).into())
            }
        };
        if first != address {
            return Err(format!("'{text}' has bits behind its prefix; write \"{first}/{prefix}\""));
        }
        Ok(Self { first, prefix })
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

impl Scalar for AddressRange {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        Self::parse(&String::parse(written, report)?).map_err(|reason| Situation::Unit { reason })
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_contains_the_addresses_with_its_prefix() {
        let contains =
            |range: &str, address: &str| AddressRange::parse(range).unwrap().contains(address.parse().unwrap());
        for (range, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("10.0.0.0/8", "::ffff:10.0.0.1", "::10.0.0.1"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.2"),
            ("0.0.0.0/0", "203.0.113.1", "2001:db8::1"),
            ("fd00::/8", "fd12::1", "fe80::1"),
            ("::/0", "2001:db8::1", "10.0.0.1"),
            ("2001:db8::1", "2001:db8::1", "2001:db8::2"),
        ] {
            assert!(contains(range, inside) && !contains(range, outside), "{range}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_what_to_write() {
        for text in ["", "ten", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "10.0.0/8", "10.0.0.0/-1", "a/8"] {
            let refused = AddressRange::parse(text).unwrap_err();
            assert!(refused.contains("is not a range of addresses"), "{refused}");
        }
        let refused = AddressRange::parse("10.1.2.3/8").unwrap_err();
        assert!(refused.contains("write \"10.0.0.0/8\""), "{refused}");
    }
}
