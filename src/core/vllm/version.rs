//! Versions of vLLM.
//!
//! A version is `MAJOR.MINOR[.PATCH]`. Later parts (`rc1`, `+cpu`) are ignored. Order is numeric.

use std::fmt;
use std::str::FromStr;

/// A released version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

impl Version {
    /// The version whose flags, API and metrics were compared with a running server; the default of
    /// the simulator.
    pub const COMPARED: Self = Self::new(0, 32, 0);

    /// The oldest version whose metrics are known and which reports usage in streams.
    pub const OLDEST: Self = Self::new(0, 6, 0);

    /// `MAJOR.MINOR.PATCH`
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self { major, minor, patch }
    }

    /// Whether this is version `0.minor` or later.
    pub fn since(self, minor: u16) -> bool {
        self >= Self::new(0, minor, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A text that is not a version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a version of vLLM; write it as 0.32 or 0.32.0")]
pub struct NoVersion(String);

impl FromStr for Version {
    type Err = NoVersion;

    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let wrong = || NoVersion(text.to_owned());
        let plain = text.trim().trim_start_matches('v');
        let plain = &plain[..plain.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(plain.len())];
        let mut parts = plain.trim_end_matches('.').split('.').map(str::parse::<u16>);
        let mut next = || parts.next().transpose().map_err(|_| wrong());
        let (major, minor, patch) = (next()?, next()?, next()?);
        match (major, minor) {
            (Some(major), Some(minor)) => Ok(Self::new(major, minor, patch.unwrap_or(0))),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_number() {
        let parse = |text: &str| text.parse::<Version>();
        assert!(parse("0.9.1").unwrap() < parse("v0.32").unwrap());
        assert_eq!(parse("0.32.0+cpu").unwrap(), Version::COMPARED);
        assert_eq!(parse("0.33.0rc1").unwrap(), Version::new(0, 33, 0));
        assert!(parse("latest").unwrap_err().to_string().contains("write it as 0.32"));
    }
}
