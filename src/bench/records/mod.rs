//! Reports on one day of the gateway's own records: the traffic, the slow requests, and the causes.
//!
//! Records are lines of `[records]` or of the access log: [`read`] turns each into an [`Entry`].
//! Times are UTC, latencies milliseconds. Only streams have a TTFT. Bounds: [`ENTRIES_MAX`].

pub mod read;
mod table;
pub mod worst;
mod causes;
mod day;
pub mod summary;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use day::sections;
pub use read::{Day, RecordsError};
pub use table::clock;

/// The most records of one report: about 1 GB of memory, or a day of 58 requests per second.
pub const ENTRIES_MAX: usize = 5_000_000;

/// One request. Times are seconds, latencies milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Arrival, since 1970.
    pub at: f64,
    /// The class ([[class]]); in records of earlier versions the home pool.
    pub class: Arc<str>,
    /// The pool that ran the request; the home pool if none did.
    pub pool: Arc<str>,
    /// The last backend tried; empty if none was.
    pub backend: Arc<str>,
    /// The model.
    pub model: Arc<str>,
    /// The outcome, as in the gateway's metrics.
    pub outcome: Arc<str>,
    /// The reason, if the request failed.
    pub detail: Arc<str>,
    /// The reasons for repeated attempts.
    pub retries: Arc<str>,
    /// Name of the file with the record.
    pub file: Arc<str>,
    /// Line in the file, from 1.
    pub line: u32,
    /// Time for which the request waited for a backend.
    pub queue: f64,
    /// Time to first token of a stream.
    pub ttft: Option<f64>,
    /// Time from sending the request to the engine until the first token of a stream.
    pub engine: Option<f64>,
    /// Time per output token.
    pub tpot: Option<f64>,
    /// End-to-end latency.
    pub e2el: Option<f64>,
    /// Prompt tokens, counted or estimated.
    pub prompt: u64,
    /// Output tokens.
    pub output: u64,
    /// Prompt tokens from the prefix cache.
    pub cached: u64,
    /// Whether the objectives were met, if there are any.
    pub met: Option<bool>,
}

impl Entry {
    /// Whether the client got the whole response.
    pub fn is_completed(&self) -> bool {
        &*self.outcome == "completed"
    }

    /// Whether the gateway refused the request because no backend had room or was ready.
    pub fn is_shed(&self) -> bool {
        &*self.outcome == "shed"
    }

    /// Whether an engine failed or a timeout expired.
    pub fn is_broken(&self) -> bool {
        matches!(&*self.outcome, "upstream_error" | "timeout")
    }

    /// Whether the request failed for the client or missed an objective.
    pub fn is_miss(&self) -> bool {
        self.is_shed() || self.is_broken() || self.met == Some(false)
    }

    /// The latency by which slow requests are sorted: TTFT, or E2EL if not streamed.
    pub fn latency(&self) -> Option<f64> {
        self.ttft.or(self.e2el)
    }

    /// File and line of the record.
    pub fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }

    fn length(&self) -> &'static str {
        LENGTHS.iter().find(|(most, _)| self.prompt <= *most).map_or("", |(_, name)| name)
    }
}

const LENGTHS: [(u64, &str); 5] =
    [(1_000, "up to 1k"), (4_000, "1k to 4k"), (16_000, "4k to 16k"), (64_000, "16k to 64k"), (u64::MAX, "over 64k")];

type Group<'a> = Vec<&'a Entry>;

fn group<'a, K: Ord>(entries: impl IntoIterator<Item = &'a Entry>, by: impl Fn(&Entry) -> K) -> BTreeMap<K, Group<'a>> {
    let mut groups: BTreeMap<K, Group<'a>> = BTreeMap::new();
    entries.into_iter().for_each(|entry| groups.entry(by(entry)).or_default().push(entry));
    groups
}

#[cfg(test)]
mod tests;
