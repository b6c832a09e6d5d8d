//! The worst period of some records, on which to try other settings.
//!
//! It has the most requests that failed or missed an objective, or if there are none, the longest
//! P99 of TTFT (E2EL if not streamed). Periods of [`PERIOD`] begin half a period apart. A period
//! needs [`REQUESTS_MIN`] requests, or all if there are fewer. If no period has that many, the one
//! with the most requests is taken.

use super::Entry;
use super::table::{count, quantile};

/// Length of a period, seconds.
pub const PERIOD: f64 = 300.0;
/// With fewer requests, a P99 says little.
const REQUESTS_MIN: usize = 20;

/// A period.
#[derive(Clone, Debug, PartialEq)]
pub struct Period {
    /// Start, seconds since 1970.
    pub from: f64,
    /// End, seconds since 1970.
    pub to: f64,
    /// Requests that arrived in the period.
    pub requests: usize,
    /// Requests that failed or missed an objective.
    pub missed: usize,
    /// P99 of TTFT (E2EL if not streamed), milliseconds; 0 if unknown.
    pub p99: f64,
}

/// The worst period of records in the order of arrival, if there are any.
pub fn worst(entries: &[Entry]) -> Option<Period> {
    let first = entries.first()?.at;
    let is_judged = entries.iter().any(Entry::is_miss);
    let enough = entries.len().min(REQUESTS_MIN);
    let key = |period: &Period| if is_judged { period.missed as f64 } else { period.p99 };
    let all: Vec<Period> = begins(entries, first).map(|from| period(entries, from)).collect();
    let of_enough = all.iter().filter(|period| period.requests >= enough);
    let worst = of_enough.max_by(|one, other| key(one).total_cmp(&key(other)));
    worst.or_else(|| all.iter().max_by_key(|period| period.requests)).cloned()
}

/// The starts of periods whose first half has a request.
fn begins(entries: &[Entry], first: f64) -> impl Iterator<Item = f64> {
    let mut next = 0.0_f64;
    entries.iter().filter_map(move |entry| {
        let half = ((entry.at - first) / (PERIOD / 2.0)).floor();
        (half >= next).then(|| {
            next = half + 1.0;
            first + half * PERIOD / 2.0
        })
    })
}

fn period(entries: &[Entry], from: f64) -> Period {
    let to = from + PERIOD;
    let begin = entries.partition_point(|entry| entry.at < from);
    let end = entries.partition_point(|entry| entry.at < to);
    let inside: Vec<&Entry> = entries[begin..end].iter().collect();
    let missed = count(&inside, Entry::is_miss);
    let p99 = quantile(&inside, 0.99, Entry::latency).unwrap_or(0.0);
    Period { from, to, requests: inside.len(), missed, p99 }
}
