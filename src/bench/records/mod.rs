//! A day of the gateway's own records: what was asked, what was slow, and why.
//!
//! Records are lines of `[records]` or of the access log. [`Entry`] is what is kept of one ([`read`]), [`day`] and [`causes`] make
//! the sections of a page from them, [`worst`] finds the period that most deserves a second look, [`summary`] says it all in a
//! few lines of text. Times are UTC, latencies milliseconds; TTFT is of streams.
//!
//! Bounds: [`ENTRIES_MAX`] records.

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

/// The most records of one report, about 1 GB in memory: a day of 58 requests per second.
pub const ENTRIES_MAX: usize = 5_000_000;

/// One request. Times are seconds, latencies milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// When it arrived, since 1970.
    pub at: f64,
    /// Its home pool.
    pub class: Arc<str>,
    /// The pool in which it ran; its home pool if it did not.
    pub pool: Arc<str>,
    /// The backend, the last one tried; empty if none was.
    pub backend: Arc<str>,
    /// Its model.
    pub model: Arc<str>,
    /// How it ended: one of the words of the metric.
    pub outcome: Arc<str>,
    /// Why, if it failed.
    pub detail: Arc<str>,
    /// Why attempts were repeated.
    pub retries: Arc<str>,
    /// The name of the file it stands in.
    pub file: Arc<str>,
    /// The line, from 1.
    pub line: u32,
    /// Waiting for a backend.
    pub queue: f64,
    /// Time to first token of a stream.
    pub ttft: Option<f64>,
    /// The same from when it had been sent to the engine.
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
    /// Whether it met its objectives.
    pub met: Option<bool>,
}

impl Entry {
    /// Whether it got its whole response.
    pub fn is_completed(&self) -> bool {
        &*self.outcome == "completed"
    }

    /// Whether the gateway refused it because no backend had room or was ready.
    pub fn is_shed(&self) -> bool {
        &*self.outcome == "shed"
    }

    /// Whether an engine failed it, or it took too long.
    pub fn is_broken(&self) -> bool {
        matches!(&*self.outcome, "upstream_error" | "timeout")
    }

    /// Whether it failed for the client, or missed an objective.
    pub fn is_miss(&self) -> bool {
        self.is_shed() || self.is_broken() || self.met == Some(false)
    }

    /// By what it is sorted among slow requests: TTFT, or E2EL where nothing was streamed.
    pub fn latency(&self) -> Option<f64> {
        self.ttft.or(self.e2el)
    }

    /// Where it stands.
    pub fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }

    /// Its length class.
    fn length(&self) -> &'static str {
        LENGTHS.iter().find(|(most, _)| self.prompt <= *most).map_or("", |(_, name)| name)
    }
}

/// Lengths of prompts that are distinguished, in tokens.
const LENGTHS: [(u64, &str); 5] =
    [(1_000, "up to 1k"), (4_000, "1k to 4k"), (16_000, "4k to 16k"), (64_000, "16k to 64k"), (u64::MAX, "over 64k")];

/// Requests of one kind.
type Group<'a> = Vec<&'a Entry>;

fn group<'a, K: Ord>(entries: impl IntoIterator<Item = &'a Entry>, by: impl Fn(&Entry) -> K) -> BTreeMap<K, Group<'a>> {
    let mut groups: BTreeMap<K, Group<'a>> = BTreeMap::new();
    entries.into_iter().for_each(|entry| groups.entry(by(entry)).or_default().push(entry));
    groups
}

#[cfg(test)]
mod tests;
