//! Sizes with units, as a configuration writes them: `8k` tokens, `32MiB`, `250ms`.
//!
//! Grammar: a non-negative decimal number (`1.5` is allowed), optional blanks, then a unit. Tokens
//! take `k` (1,000) and `M` (1,000,000). Bytes take `B kB MB GB` (powers of 1,000) and
//! `KiB MiB GiB` (powers of 1,024). Durations take `us ms s m h d`; every duration but 0 needs a
//! unit, because some tools read a bare `30` as seconds and others as milliseconds. A value with a
//! fraction must be a whole number of base units (token, byte, microsecond). Other spellings such
//! as `K` for `k` are accepted.
//!
//! Display uses the largest unit that divides the value, so the text parses back to the same value.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// A number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokens(pub u64);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// A length of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Period(pub Duration);

/// Why a string is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The string does not begin with a number.
    #[error("'{0}' is not {1}")]
    NotANumber(String, &'static str),
    /// A duration has no unit.
    #[error("'{0}' has no unit; write \"{0}s\" for seconds, \"{0}ms\" or \"{0}m\"")]
    NoUnit(String),
    /// The unit is unknown.
    #[error("'{0}' has no known unit; write {1}")]
    UnknownUnit(String, &'static str),
    /// The value is too large or not a whole number of base units.
    #[error("'{0}' is out of range or not a whole number of {1}")]
    OutOfRange(String, &'static str),
}

const TOKEN_UNITS: &[(&str, u64)] = &[("M", 1_000_000), ("k", 1_000), ("", 1)];
const BYTE_UNITS: &[(&str, u64)] = &[
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];
/// Factors in microseconds.
const TIME_UNITS: &[(&str, u64)] =
    &[("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000), ("us", 1)];

impl FromStr for Tokens {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let extra: &[(&str, u64)] = &[("K", 1_000), ("m", 1_000_000)];
        parse(text, &[TOKEN_UNITS, extra], "a number of tokens such as 5000, \"5k\" or \"1.5M\"", "tokens").map(Self)
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let extra: &[(&str, u64)] =
            &[("", 1), ("KB", 1_000), ("k", 1_000), ("K", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
        parse(text, &[BYTE_UNITS, extra], "a size such as \"512KiB\" or \"32MiB\"", "bytes").map(Self)
    }
}

impl FromStr for Period {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        if text.trim() == "0" {
            return Ok(Self(Duration::ZERO));
        }
        let micros =
            parse(text, &[TIME_UNITS], "a duration such as \"250ms\", \"20s\", \"5m\" or \"1h\"", "microseconds")?;
        Ok(Self(Duration::from_micros(micros)))
    }
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_shortest(f, self.0, TOKEN_UNITS)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_shortest(f, self.0, BYTE_UNITS)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = u64::try_from(self.0.as_micros()).unwrap_or(u64::MAX);
        if micros == 0 {
            return f.write_str("0s");
        }
        write_shortest(f, micros, TIME_UNITS)
    }
}

fn parse(text: &str, tables: &[&[(&str, u64)]], wanted: &'static str, base: &'static str) -> Result<u64, UnitError> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let number = number.replace('_', "");
    if number.is_empty() || number == "." {
        return Err(UnitError::NotANumber(text.to_owned(), wanted));
    }
    let unit = unit.trim();
    let scale = tables
        .iter()
        .flat_map(|table| table.iter())
        .find(|(name, _)| *name == unit)
        .map(|(_, scale)| *scale)
        .ok_or_else(|| match unit {
        // Only durations need a unit.
        "" => UnitError::NoUnit(trimmed.to_owned()),
        _ => UnitError::UnknownUnit(text.to_owned(), wanted),
    })?;
    scaled(&number, scale).ok_or_else(|| UnitError::OutOfRange(text.to_owned(), base))
}

/// `number` (decimal digits with at most one point) times `scale`, exactly. `None` if the product
/// is not whole or overflows.
fn scaled(number: &str, scale: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()? };
    let mut value = whole.checked_mul(scale)?;
    if !fraction.is_empty() {
        let unit = 10u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
        if !part.is_multiple_of(u128::from(unit)) {
            return None;
        }
        value = value.checked_add(u64::try_from(part / u128::from(unit)).ok()?)?;
    }
    Some(value)
}

fn write_shortest(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let fits = |scale: u64| value > 0 && value.is_multiple_of(scale);
    let (name, scale) = units.iter().find(|(_, scale)| fits(*scale)).or(units.last()).copied().unwrap_or(("", 1));
    write!(f, "{}{}", value / scale, name)
}

/// Accepts a string with a unit. If the second field has a function, a bare number in base units is
/// accepted too.
struct SizeVisitor<T>(std::marker::PhantomData<T>, Option<fn(u64) -> T>);

impl<T: FromStr<Err = UnitError>> Visitor<'_> for SizeVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.1.is_some() {
            "a number or a string with a unit"
        } else {
            "a string with a unit, such as \"250ms\""
        })
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        match self.1 {
            Some(make) => Ok(make(value)),
            None => Err(E::custom(format!("{value} has no unit; write \"{value}ms\" or \"{value}s\""))),
        }
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        let value = u64::try_from(value).map_err(|_| E::custom(format!("{value} is negative")))?;
        self.visit_u64(value)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! size_serde {
    ($name:ident, $make:expr) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(SizeVisitor(std::marker::PhantomData, $make))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    };
}

size_serde!(Tokens, Some(Tokens as fn(u64) -> Tokens));
size_serde!(ByteSize, Some(ByteSize as fn(u64) -> ByteSize));
size_serde!(Period, None);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_in_every_notation() {
        assert_eq!("5k".parse(), Ok(Tokens(5_000)));
        assert_eq!("1.5M".parse(), Ok(Tokens(1_500_000)));
        assert_eq!("400_000".parse(), Ok(Tokens(400_000)));
        assert_eq!("32MiB".parse(), Ok(ByteSize(32 << 20)));
        assert_eq!("32 MB".parse(), Ok(ByteSize(32_000_000)));
        assert_eq!("250ms".parse(), Ok(Period(Duration::from_millis(250))));
        assert_eq!("1.5m".parse(), Ok(Period(Duration::from_secs(90))));
    }

    #[test]
    fn a_bare_duration_is_refused_because_it_is_ambiguous() {
        let error = "30".parse::<Period>().unwrap_err();
        assert_eq!(error.to_string(), "'30' has no unit; write \"30s\" for seconds, \"30ms\" or \"30m\"");
    }

    #[test]
    fn invalid_sizes_are_refused_with_the_reason() {
        assert!(matches!("many".parse::<Tokens>(), Err(UnitError::NotANumber(..))));
        assert!(matches!("5 parsecs".parse::<Period>(), Err(UnitError::UnknownUnit(..))));
        assert!(matches!("0.5B".parse::<ByteSize>(), Err(UnitError::OutOfRange(..))));
        assert!("99999999999M".parse::<Tokens>().is_ok());
        assert!(matches!("99999999999999999M".parse::<Tokens>(), Err(UnitError::OutOfRange(..))));
    }

    proptest! {
        #[test]
        fn the_displayed_form_parses_back(value in 0u64..u64::MAX / 2) {
            prop_assert_eq!(Tokens(value).to_string().parse(), Ok(Tokens(value)));
            prop_assert_eq!(ByteSize(value).to_string().parse(), Ok(ByteSize(value)));
            let period = Period(Duration::from_micros(value));
            prop_assert_eq!(period.to_string().parse(), Ok(period));
        }
    }
}
