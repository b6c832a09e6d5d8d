//! The worst period of some records: the one to try other settings on.
//!
//! With objectives or failures it is the period with the most requests that failed or missed an objective; without, the one with
//! the longest P99 of TTFT (of E2EL where nothing is streamed). Periods begin every half of their length.

use super::Entry;
use super::table::{count, quantile};

/// Length of a period, seconds.
pub const PERIOD: f64 = 300.0;
/// A period with fewer requests says little about a P99.
const REQUESTS_MIN: usize = 20;

/// A period.
#[derive(Clone, Debug, PartialEq)]
pub struct Period {
    /// Its begin, seconds since 1970.
    pub from: f64,
    /// Its end.
    pub to: f64,
    /// Requests that arrived in it.
    pub requests: usize,
    /// Those that failed or missed an objective.
    pub missed: usize,
    /// P99 of TTFT, or of E2EL where nothing is streamed; milliseconds.
    pub p99: f64,
}

/// The worst period of records in the order of their arrival. `None`: there are none.
pub fn worst(entries: &[Entry]) -> Option<Period> {
    let first = entries.first()?.at;
    let is_judged = entries.iter().any(Entry::is_miss);
    let enough = entries.len().min(REQUESTS_MIN);
    let key = |period: &Period| if is_judged { period.missed as f64 } else { period.p99 };
    let all = begins(entries, first).map(|from| period(entries, from));
    all.filter(|period| period.requests >= enough)
        .max_by(|one, other| key(one).total_cmp(&key(other)))
        .or_else(|| Some(period(entries, first)))
}

/// Where periods begin that have a request in their first half. Times without requests are skipped, however long they are.
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
