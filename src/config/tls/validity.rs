//! Reads the validity period of a certificate from its DER.
//!
//! A metric must show when the gateway's own certificate expires, but rustls, which verifies the
//! dates of a peer's certificate, does not expose dates. The fields before the dates (RFC 5280,
//! 4.1: version, serial number, algorithm, issuer) are skipped by their lengths, because a full
//! parser would add a dozen crates.

use jiff::civil::DateTime;

/// The period in which a certificate is valid, in Unix seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first second.
    pub from: i64,
    /// The last second.
    pub until: i64,
}

const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xA0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

impl Validity {
    /// The dates of an X.509 certificate in DER; `None` when they cannot be read.
    pub(super) fn of(certificate: &[u8]) -> Option<Self> {
        let (_, certificate, _) = element(certificate).filter(|found| found.0 == SEQUENCE)?;
        let (_, mut fields, _) = element(certificate).filter(|found| found.0 == SEQUENCE)?;
        if let Some((VERSION, _, rest)) = element(fields) {
            fields = rest;
        }
        // Serial number, algorithm, issuer.
        for _ in 0..3 {
            fields = element(fields)?.2;
        }
        let (_, dates, _) = element(fields).filter(|found| found.0 == SEQUENCE)?;
        let (from_tag, from, dates) = element(dates)?;
        let (until_tag, until, _) = element(dates)?;
        Some(Self { from: seconds(from_tag, from)?, until: seconds(until_tag, until)? })
    }

    /// Whether `now`, in Unix seconds, is in the period.
    pub fn contains(&self, now: i64) -> bool {
        (self.from..=self.until).contains(&now)
    }
}

/// Tag and content of the first element, and the rest of the input.
fn element(input: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], rest) = input.split_first_chunk()?;
    let (length, rest) = match first {
        0..=0x7F => (usize::from(first), rest),
        // A length has at most three bytes, because certificates are far below 16 MiB.
        0x81..=0x83 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// A time of a certificate: `YYMMDDHHMMSSZ` (years from 1950 to 2049) or `YYYYMMDDHHMMSSZ`.
fn seconds(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z").filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let (year, rest) = match (tag, digits.len()) {
        (UTC_TIME, 12) => {
            let short = number(&digits[..2]);
            (if short < 50 { 2000 + short } else { 1900 + short }, &digits[2..])
        }
        (GENERALIZED_TIME, 14) => (number(&digits[..4]), &digits[4..]),
        _ => return None,
    };
    let part = |index: usize| i8::try_from(number(&rest[2 * index..2 * index + 2])).ok();
    let time = DateTime::new(year, part(0)?, part(1)?, part(2)?, part(3)?, part(4)?, 0).ok()?;
    // `Timestamp` cannot be used: the range ends a day before the largest date of a certificate.
    Some(time.duration_since(EPOCH).as_secs())
}

fn number(digits: &[u8]) -> i16 {
    digits.iter().fold(0, |number, digit| number * 10 + i16::from(digit - b'0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_both_forms_are_read() {
        assert_eq!(seconds(UTC_TIME, b"700101000000Z"), Some(0));
        assert_eq!(seconds(UTC_TIME, b"491231235959Z"), seconds(GENERALIZED_TIME, b"20491231235959Z"));
        assert_eq!(seconds(GENERALIZED_TIME, b"20260102030405Z"), Some(1_767_323_045));
        // This date marks a certificate without an expiry date (RFC 5280, 4.1.2.5).
        assert_eq!(seconds(GENERALIZED_TIME, b"99991231235959Z"), Some(253_402_300_799));
        for wrong in [&b"7001010000Z"[..], b"700101000000", b"701301000000Z", b"7001010000+0Z", b""] {
            assert_eq!(seconds(UTC_TIME, wrong), None);
        }
    }

    #[test]
    fn bytes_that_are_no_certificate_have_no_dates() {
        for wrong in [&b""[..], b"\x30", b"\x30\x03\x30\x01\x02", b"\x30\x84\xff\xff\xff\xff", &[0x30; 64]] {
            assert_eq!(Validity::of(wrong), None);
        }
    }
}
