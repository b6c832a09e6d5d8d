//! The place of a request in a distributed trace (W3C Trace Context, version 00 and later), and
//! sampling.
//!
//! A client may send the header `traceparent`: the ids of the trace and of the client's span, and
//! whether the client samples the trace; the gateway follows that choice. Without the header the
//! gateway begins a new trace, and samples a share of the new traces. The low 64 bits of the trace
//! id decide whether a trace is in the share, as in OpenTelemetry's libraries, so gateways with the
//! same share sample the same traces.
//!
//! Ids are numbers and come from the caller; 0 is not a valid id. Nothing here allocates.

use std::fmt;
use std::str::FromStr;

use super::{Rng, hash_two};

/// Bytes of a `traceparent` of version 00.
const LENGTH: usize = 55;
const SAMPLED: u8 = 1;
/// The flags that the gateway passes on: "sampled" and "the id is random". All other flags must be
/// sent as 0.
const KNOWN_FLAGS: u8 = 3;

/// The value of the header `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// Id of the trace.
    pub trace: u128,
    /// Id of the sender's span.
    pub span: u64,
    flags: u8,
}

/// The text is not a `traceparent`; callers treat the header as absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent header")]
pub struct NotATraceParent;

impl TraceParent {
    /// Begins a trace for a request whose client sent no context. `share`: share of traces to
    /// sample. `random`: source of the ids. `None` if the trace is not sampled.
    pub fn begin(share: f64, random: &mut Rng) -> Option<Self> {
        let trace = u128::from(random.next_u64()) << 64 | u128::from(random.next_u64());
        let span = random.next_u64();
        let is_sampled = ((trace as u64) >> 1) < (share.clamp(0.0, 1.0) * (1u64 << 63) as f64) as u64;
        (is_sampled && trace != 0 && span != 0).then_some(Self { trace, span, flags: SAMPLED })
    }

    /// Whether the sender samples the trace.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The same context, marked as not sampled.
    pub fn without_sampling(self) -> Self {
        Self { flags: self.flags & !SAMPLED, ..self }
    }

    /// The same trace and flags, with child span `number` of this span. The new id is never 0.
    pub fn child(self, number: u64) -> Self {
        let span = hash_two(self.span, number).max(1);
        Self { span, ..self }
    }
}

impl FromStr for TraceParent {
    type Err = NotATraceParent;

    /// Versions after 00 may append fields behind another dash; these are not read.
    fn from_str(text: &str) -> Result<Self, NotATraceParent> {
        let bytes = text.as_bytes();
        let dashes = bytes.len() >= LENGTH && [2, 35, 52].iter().all(|at| bytes[*at] == b'-');
        let is_long = bytes.len() > LENGTH && bytes[LENGTH] == b'-';
        if !dashes || !(bytes.len() == LENGTH || is_long) {
            return Err(NotATraceParent);
        }
        let version = hex(&bytes[..2])?;
        if version == 0xFF || (version == 0 && is_long) {
            return Err(NotATraceParent);
        }
        let (trace, span, flags) = (hex(&bytes[3..35])?, hex(&bytes[36..52])? as u64, hex(&bytes[53..LENGTH])? as u8);
        let is_valid = trace != 0 && span != 0;
        is_valid.then_some(Self { trace, span, flags: flags & KNOWN_FLAGS }).ok_or(NotATraceParent)
    }
}

fn hex(digits: &[u8]) -> Result<u128, NotATraceParent> {
    digits.iter().try_fold(0, |number, digit| match digit {
        b'0'..=b'9' => Ok(number << 4 | u128::from(digit - b'0')),
        b'a'..=b'f' => Ok(number << 4 | u128::from(digit - b'a' + 10)),
        _ => Err(NotATraceParent),
    })
}

/// Writes a header of version 00.
impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_header_reads_back_as_it_was_written() {
        let parent: TraceParent = VALID.parse().unwrap();
        assert_eq!((parent.trace, parent.span), (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 0x00f0_67aa_0ba9_02b7));
        assert!(parent.is_sampled());
        assert_eq!(parent.to_string(), VALID);
        let random: TraceParent = VALID.replace("-01", "-02").parse().unwrap();
        assert!(!random.is_sampled() && random.to_string().ends_with("-02"));
    }

    #[test]
    fn malformed_headers_are_refused_and_later_versions_read() {
        for text in [
            "",
            &VALID[1..],
            &VALID.to_uppercase(),
            &VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &VALID.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &VALID.replace("00-4", "ff-4"),
            &VALID.replace('-', "_"),
            &format!("{VALID}-more"),
            &format!("{VALID}x"),
            &VALID.replace("-01", "-g1"),
            &VALID.replace("-01", "-é"),
        ] {
            assert_eq!(text.parse::<TraceParent>(), Err(NotATraceParent), "{text}");
        }
        let later: TraceParent = format!("cc{}-more", &VALID[2..]).parse().unwrap();
        assert_eq!(later.to_string(), VALID);
    }

    #[test]
    fn the_share_of_traces_that_begin_is_the_configured_one() {
        let mut random = Rng::new(1);
        for share in [0.0, 0.01, 0.5, 1.0] {
            let begun = (0..20_000).filter(|_| TraceParent::begin(share, &mut random).is_some()).count();
            assert!((begun as f64 / 20_000.0 - share).abs() < 0.01, "{begun} of {share}");
        }
    }

    #[test]
    fn spans_below_differ_and_stay_in_the_trace() {
        let parent: TraceParent = VALID.parse().unwrap();
        let spans: std::collections::BTreeSet<u64> = (0..1_000).map(|number| parent.child(number).span).collect();
        assert_eq!(spans.len(), 1_000);
        assert!(!spans.contains(&parent.span) && parent.child(7).trace == parent.trace);
    }
}
