//! The types of single values: numbers, sizes, durations, paths, names, words, addresses, URLs of
//! backends.
//!
//! Each type defines how it is written in the file and how it is shown. A new type for a key is an
//! `impl Scalar` here or next to the type.
//!
//! The URL of a backend may have a path, which is put before the path of every request, for engines
//! behind another proxy that has a prefix. Clients' paths already start with `/v1`, so a URL that
//! ends in `/v1` is a common mistake and refused.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::file::{Entry, Value};
use super::limits;
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::{Scalar, wrong_type};
use sluice_core::base::{ByteSize, Period, Tokens};

/// Declares an enum whose values are words of the configuration. Reading, messages, the resolved
/// page and the reference file use the same words. An unknown word is an error, never a default.
macro_rules! words {
    ($(#[$attribute:meta])* $vis:vis enum $name:ident {
        $($(#[$doc:meta])* $variant:ident = $word:literal,)+
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word in the configuration.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl $crate::setting::Scalar for $name {
            const WORDS: &'static [&'static str] = Self::WORDS;

            fn parse(
                written: &$crate::file::Entry,
                report: &$crate::report::Report<'_>,
            ) -> Result<Self, $crate::problem::Situation> {
                let found = String::parse(written, report)?;
                match found.as_str() {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let known = Self::WORDS.iter().copied();
                        let suggestion = $crate::problem::Suggestion::for_name(&found, known);
                        Err($crate::problem::Situation::UnknownChoice { found, suggestion })
                    }
                }
            }

            fn text(&self, _: &$crate::report::Names) -> String {
                self.word().to_owned()
            }
        }
    };
}
pub(super) use words;

impl Scalar for String {
    fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
        if let Value::Text(text) = &written.value { Ok(text.clone()) } else { Err(wrong_type("a text", written)) }
    }

    fn text(&self, _: &Names) -> String {
        self.clone()
    }

    fn placeholder() -> Option<Self> {
        Some(Self::new())
    }
}

/// Relative paths start at the folder of the configuration file.
impl Scalar for PathBuf {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        Ok(report.surroundings.folder.join(String::parse(written, report)?))
    }

    fn text(&self, _: &Names) -> String {
        self.display().to_string()
    }
}

impl Scalar for bool {
    fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
        if let Value::Bool(flag) = written.value { Ok(flag) } else { Err(wrong_type("true or false", written)) }
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }

    fn toml(&self, names: &Names) -> String {
        self.text(names)
    }
}

impl Scalar for f64 {
    fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
        match written.value {
            Value::Float(number) if number.is_finite() => Ok(number),
            Value::Int(number) => Ok(number as Self),
            _ => Err(wrong_type("a number", written)),
        }
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }

    fn toml(&self, _: &Names) -> String {
        format!("{self:?}")
    }

    fn magnitude(&self) -> Option<f64> {
        Some(*self)
    }
}

macro_rules! whole_numbers {
    ($($name:ty)*) => {$(
        impl Scalar for $name {
            fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
                let Value::Int(number) = written.value else { return Err(wrong_type("a whole number", written)) };
                Self::try_from(number).map_err(|_| match number < 0 {
                    true => wrong_type(&format!("a whole number from {}", Self::MIN), written),
                    false => wrong_type(&format!("a whole number up to {}", Self::MAX), written),
                })
            }

            fn text(&self, _: &Names) -> String {
                self.to_string()
            }

            fn toml(&self, names: &Names) -> String {
                self.text(names)
            }

            fn magnitude(&self) -> Option<f64> {
                Some(*self as f64)
            }

            fn placeholder() -> Option<Self> {
                Some(0)
            }
        }
    )*};
}

whole_numbers! { u16 u32 usize i32 }

fn unit<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<T, Situation> {
    text.parse().map_err(|error: T::Err| Situation::Unit { reason: error.to_string() })
}

macro_rules! sizes {
    ($($name:ident: $wanted:literal;)*) => {$(
        impl Scalar for $name {
            fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
                match &written.value {
                    Value::Text(text) => unit(text),
                    Value::Int(number) => u64::try_from(*number).map(Self).map_err(|_| wrong_type($wanted, written)),
                    _ => Err(wrong_type($wanted, written)),
                }
            }

            fn text(&self, _: &Names) -> String {
                self.to_string()
            }

            fn magnitude(&self) -> Option<f64> {
                Some(self.0 as f64)
            }

            fn placeholder() -> Option<Self> {
                Some(Self(0))
            }
        }
    )*};
}

sizes! {
    Tokens: "a number of tokens such as \"5k\"";
    ByteSize: "a size such as \"32MiB\"";
}

impl Scalar for Duration {
    fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
        let period: Period = match &written.value {
            Value::Text(text) => unit(text),
            Value::Int(number) => unit(&number.to_string()),
            Value::Float(number) => unit(&number.to_string()),
            _ => Err(wrong_type("a duration such as \"20s\"", written)),
        }?;
        Ok(period.0)
    }

    fn text(&self, _: &Names) -> String {
        Period(*self).to_string()
    }

    fn magnitude(&self) -> Option<f64> {
        Some(self.as_secs_f64())
    }
}

impl Scalar for SocketAddr {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let text = String::parse(written, report)?;
        let whole = match (text.strip_prefix("localhost:"), text.strip_prefix(':')) {
            (Some(port), _) => format!("127.0.0.1:{port}"),
            (_, Some(port)) => format!("0.0.0.0:{port}"),
            _ => text.clone(),
        };
        whole.parse().map_err(|_| Situation::Address { found: text })
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }
}

impl Scalar for RangeInclusive<u16> {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        let text = String::parse(written, report)?;
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let range = text.split_once('-').and_then(|(first, last)| Some(port(first)?..=port(last)?));
        range.filter(|range| !range.is_empty()).ok_or_else(|| {
            let reason =
                format!("'{text}' is not a range of ports; write the first and the last, such as \"8100-8999\"");
            Situation::Unit { reason }
        })
    }

    fn text(&self, _: &Names) -> String {
        format!("{}-{}", self.start(), self.end())
    }
}

/// Checks that a name can be a label and a header value.
pub(super) fn check_name(name: &str) -> Result<(), Situation> {
    check_length(name, limits::MAX_NAME_BYTES)?;
    let fine = |letter: char| letter.is_ascii_alphanumeric() || "._:/-".contains(letter);
    if name.chars().all(fine) { Ok(()) } else { Err(Situation::NameLetters { name: name.to_owned() }) }
}

/// Checks that a text can be the name of a model. Model names may have more kinds of characters
/// than other names, because their authors choose them.
pub(super) fn check_model_name(name: &str) -> Result<(), Situation> {
    check_length(name, limits::MAX_MODEL_NAME_BYTES)?;
    if name == "*" || name.trim() != name || name.chars().any(char::is_control) {
        return Err(Situation::ModelNameLetters { name: name.to_owned() });
    }
    Ok(())
}

pub(super) fn not_empty(text: &str) -> Result<(), Situation> {
    if text.is_empty() { Err(Situation::Empty) } else { Ok(()) }
}

fn check_length(name: &str, max: usize) -> Result<(), Situation> {
    match name.len() {
        0 => Err(Situation::Empty),
        bytes if bytes > max => Err(Situation::NameTooLong { bytes, max }),
        _ => Ok(()),
    }
}

/// The address of an HTTP/1.1 server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// Whether the connection uses TLS.
    pub https: bool,
    /// Name or address in lower case; an IPv6 address without brackets.
    pub host: String,
    /// TCP port; 0 only for an engine of the gateway whose port has not been chosen yet.
    pub port: u16,
    /// The path that is put before every path; empty, or begins with `/` and does not end with `/`.
    pub prefix: String,
}

impl Endpoint {
    /// `host:port`, as in a URL or a `Host` header.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.https { "https" } else { "http" }, self.authority(), self.prefix)
    }
}

impl Scalar for Endpoint {
    fn parse(written: &Entry, report: &Report<'_>) -> Result<Self, Situation> {
        endpoint(&String::parse(written, report)?)
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }
}

fn endpoint(text: &str) -> Result<Endpoint, Situation> {
    let wrong = |reason| Situation::Url { found: text.to_owned(), reason };
    let lower = text.to_ascii_lowercase();
    let https = lower.starts_with("https://");
    if !https && !lower.starts_with("http://") {
        return Err(wrong("it must begin with http:// or https://"));
    }
    let rest = &text[if https { "https://".len() } else { "http://".len() }..];
    if rest.contains(['?', '#', '@', '\\']) || rest.chars().any(|letter| !letter.is_ascii_graphic()) {
        return Err(wrong("only host, port and path are supported, in plain ASCII"));
    }
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let prefix = path.trim_end_matches('/').to_owned();
    if prefix.ends_with("/v1") {
        return Err(wrong("clients' paths already begin with /v1; leave it out"));
    }
    let usual = if https { 443 } else { 80 };
    let (host, port) = host_and_port(authority, usual).ok_or_else(|| wrong("host or port is missing or malformed"))?;
    Ok(Endpoint { https, host, port, prefix })
}

fn host_and_port(authority: &str, usual: u16) -> Option<(String, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok()?,
        Some(_) => return None,
        None => usual,
    };
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-:".contains(letter);
    let fine = port != 0 && !host.is_empty() && host.len() <= 255 && host.chars().all(plain);
    fine.then(|| (host.to_ascii_lowercase(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_name_a_place_are_taken_apart() {
        for (text, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("HTTP://Gpu0", "http://gpu0:80"),
            ("http://[::1]:8000/", "http://[::1]:8000"),
            ("HTTPS://Gpu0/", "https://gpu0:443"),
            ("https://[::1]:8000/a", "https://[::1]:8000/a"),
            ("http://edge:80/engine-a/", "http://edge:80/engine-a"),
        ] {
            assert_eq!(endpoint(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn urls_that_cannot_be_backends_are_refused_with_a_reason() {
        for text in [
            "gpu0:8000",
            "http://",
            "https://",
            "httpss://a",
            "http://:80",
            "http://a:0",
            "http://a:99999",
            "http://a:+80",
            "http://a b",
            "http://u@h",
            "http://h?x=1",
            "http://h:8000/v1",
            "http://h/v1/",
            "http://[::1",
            "http://[x]:1",
            "http://ä",
        ] {
            assert!(matches!(endpoint(text), Err(Situation::Url { .. })), "{text}");
        }
    }
}
