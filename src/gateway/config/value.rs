//! The types of single values: numbers, sizes, durations, paths, addresses, words.
//!
//! Each says how it is written in the file and how it is shown. A new type that a key may have is an `impl Scalar` here or
//! beside its definition.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::file::{Entry, Value};
use super::problem::Situation;
use super::report::{Names, Report};
use super::setting::{Scalar, wrong_type};
use sluice_core::base::{ByteSize, Period, Tokens};

/// Declares an enum whose values are words of the configuration. Reading, messages, the resolved page and the reference
/// file use the same words. An unknown word is an error, never a default.
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

            /// The word for it in the configuration.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl $crate::config::setting::Scalar for $name {
            const WORDS: &'static [&'static str] = Self::WORDS;

            fn parse(
                written: &$crate::config::file::Entry,
                report: &$crate::config::report::Report<'_>,
            ) -> Result<Self, $crate::config::problem::Situation> {
                let found = String::parse(written, report)?;
                match found.as_str() {
                    $($word => Ok(Self::$variant),)+
                    _ => {
                        let known = Self::WORDS.iter().copied();
                        let suggestion = $crate::config::suggest::Suggestion::for_name(&found, known);
                        Err($crate::config::problem::Situation::UnknownChoice { found, suggestion })
                    }
                }
            }

            fn text(&self, _: &$crate::config::report::Names) -> String {
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
        Ok(report.around.folder.join(String::parse(written, report)?))
    }

    fn text(&self, _: &Names) -> String {
        self.display().to_string()
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
    ($($name:ty: $wanted:literal;)*) => {$(
        impl Scalar for $name {
            fn parse(written: &Entry, _: &Report<'_>) -> Result<Self, Situation> {
                let whole = if let Value::Int(number) = written.value { Self::try_from(number).ok() } else { None };
                whole.ok_or_else(|| wrong_type($wanted, written))
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

whole_numbers! {
    u16: "a whole number that is not negative or too large";
    u32: "a whole number that is not negative or too large";
    usize: "a whole number that is not negative or too large";
    i32: "a whole number";
}

fn unit<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, Situation> {
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
        text.replace("localhost:", "127.0.0.1:").parse().map_err(|_| Situation::Address { found: text })
    }

    fn text(&self, _: &Names) -> String {
        self.to_string()
    }
}

/// Two ports with a dash between.
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
