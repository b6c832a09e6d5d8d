//! The last finished requests, each with all times, for an operator who asks where the time of one
//! request went.
//!
//! An entry has the access log's data. The client's id is the only text of a client in it: no path,
//! no unknown model.
//!
//! Bounds: [`FINISHED_MAX`] requests of about 400 bytes and two ids of up to 145 bytes each, under
//! 3 MiB, and the last [`FAILURES_MAX`] requests that were shed or failed, which would otherwise be
//! overwritten within seconds on a busy gateway.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::estimate::PromptEstimate;
use crate::flow::record::RetryReason;
use crate::flow::{Outcome, Record};
use sluice_core::openai::{EngineTimes, Route};

/// The most requests that are kept.
pub const FINISHED_MAX: usize = 4_096;
/// The most kept requests that were shed or failed.
pub const FAILURES_MAX: usize = 64;
/// The most requests with the same id that are shown, because clients choose ids.
const SAME_ID_MAX: usize = 8;

/// One finished request. Values that do not apply are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestView {
    /// When the request ended, RFC 3339.
    pub time: String,
    /// The id given to the client.
    pub request_id: Arc<str>,
    /// The id sent upstream, if it is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_id: Option<Arc<str>>,
    /// The API route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The name of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<Arc<str>>,
    /// The model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Arc<str>>,
    /// The class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Arc<str>>,
    /// The pool in which the request ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// The backend, or the last one tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<Arc<str>>,
    /// The arm of an experiment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arm: Option<Arc<str>>,
    /// Whether a stream was requested.
    pub stream: bool,
    /// The status that the client got.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The outcome.
    pub outcome: String,
    /// The cause.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Why attempts were repeated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub retries: Vec<String>,
    /// Estimated length of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate_tokens: Option<u64>,
    /// Method of the estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate_how: Option<String>,
    /// Length of the prompt as the engine counted it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens that were in the engine's cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Generated tokens, by the engine or by events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Time to estimate.
    pub estimate_ms: f64,
    /// Time in queues.
    pub queue_ms: f64,
    /// Time to connect.
    pub connect_ms: f64,
    /// Time for which bytes waited for the client.
    pub client_wait_ms: f64,
    /// Time to first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Time to first token since the request was sent upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend_ttft_ms: Option<f64>,
    /// Time in the queue of the engine, if the engine reports it (`--enable-per-request-metrics`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_queue_ms: Option<f64>,
    /// Time from the end of that queue to the first token, as the engine reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_prefill_ms: Option<f64>,
    /// Time per output token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// The longest gap between two tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_gap_ms: Option<f64>,
    /// End-to-end latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2el_ms: Option<f64>,
    /// Time until the request had ended.
    pub total_ms: f64,
    /// Whether all objectives were met.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_met: Option<bool>,
}

#[derive(Clone, Debug)]
struct Finished {
    at: Timestamp,
    request_id: Arc<str>,
    upstream_id: Arc<str>,
    names: [Option<Arc<str>>; 6],
    route: Option<Route>,
    stream: bool,
    status: Option<u16>,
    outcome: Outcome,
    refused: Option<&'static str>,
    retries: SmallVec<[RetryReason; 2]>,
    estimate: Option<PromptEstimate>,
    /// Prompt, cached and generated tokens.
    tokens: [Option<u64>; 3],
    /// Estimate, queue, connect, client wait, total.
    spent: [Duration; 5],
    /// TTFT, backend TTFT, TPOT, E2EL, longest gap.
    measured: [Option<Duration>; 5],
    engine: Option<EngineTimes>,
    slo_met: Option<bool>,
}

#[derive(Debug, Default)]
pub(super) struct LastRequests(Mutex<Rings>);

#[derive(Debug, Default)]
struct Rings {
    all: VecDeque<Finished>,
    failures: VecDeque<Finished>,
}

impl LastRequests {
    /// Keeps a request that ended at `at`.
    pub(super) fn add(&self, record: &Record, at: Timestamp) {
        let entry = Finished::new(record, at);
        let lost = matches!(record.outcome, Outcome::Shed(_) | Outcome::UpstreamError(_) | Outcome::Timeout(_));
        let mut rings = self.0.lock();
        if lost {
            push(&mut rings.failures, entry.clone(), FAILURES_MAX);
        }
        push(&mut rings.all, entry, FINISHED_MAX);
    }

    pub(super) fn with_id(&self, id: &str) -> Vec<RequestView> {
        let rings = self.0.lock();
        let has_id = |entry: &&Finished| *entry.request_id == *id || *entry.upstream_id == *id;
        let mut found: Vec<&Finished> = rings.all.iter().rev().filter(has_id).take(SAME_ID_MAX).collect();
        for failure in rings.failures.iter().rev().filter(has_id) {
            if found.len() < SAME_ID_MAX && !found.iter().any(|known| known.upstream_id == failure.upstream_id) {
                found.push(failure);
            }
        }
        found.into_iter().map(Finished::view).collect()
    }

    pub(super) fn failures(&self, most: usize) -> Vec<RequestView> {
        self.0.lock().failures.iter().rev().take(most).map(Finished::view).collect()
    }

    /// The slowest generating requests by total time, slowest first.
    pub(super) fn slowest(&self, most: usize) -> Vec<RequestView> {
        let rings = self.0.lock();
        let generates = |entry: &&Finished| entry.route.is_some_and(Route::generates);
        let mut all: Vec<&Finished> = rings.all.iter().filter(generates).collect();
        let by_total = |entry: &&Finished| std::cmp::Reverse(entry.spent[4]);
        if all.len() > most && most > 0 {
            all.select_nth_unstable_by_key(most - 1, by_total);
            all.truncate(most);
        }
        all.sort_by_key(by_total);
        all.into_iter().map(Finished::view).collect()
    }

    /// The number of kept requests, and when the oldest of them ended.
    pub(super) fn kept(&self) -> (usize, Option<Timestamp>) {
        let rings = self.0.lock();
        (rings.all.len(), rings.all.front().map(|entry| entry.at))
    }
}

fn push(ring: &mut VecDeque<Finished>, entry: Finished, most: usize) {
    if ring.len() >= most {
        ring.pop_front();
    }
    ring.push_back(entry);
}

impl Finished {
    fn new(record: &Record, at: Timestamp) -> Self {
        let stats = record.stats.as_ref();
        let usage = stats.map(|stats| stats.usage).unwrap_or_default();
        let generated = stats.map(|stats| stats.generated()).filter(|tokens| *tokens > 0);
        let gap = stats.filter(|stats| stats.itl.count() > 0).map(|stats| stats.itl.max_seconds());
        let names = [&record.key, &record.model, &record.class, &record.pool, &record.backend, &record.arm];
        Self {
            at,
            request_id: Arc::clone(&record.request_id),
            upstream_id: Arc::clone(&record.upstream_id),
            names: names.map(Clone::clone),
            route: record.route,
            stream: record.stream,
            status: record.status.map(|status| status.as_u16()),
            outcome: record.outcome,
            refused: record.refused.filter(|_| record.outcome == Outcome::Refused),
            retries: record.retries.clone(),
            estimate: record.estimate,
            tokens: [usage.prompt, usage.cached, generated],
            spent: [record.estimate_time, record.queue_wait, record.connect_time, record.client_wait, record.total],
            measured: [
                stats.and_then(|stats| stats.ttft),
                record.backend_ttft,
                stats.and_then(|stats| stats.tpot),
                stats.and_then(|stats| stats.e2el),
                gap.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            ],
            engine: record.engine_times(),
            slo_met: record.slo_met,
        }
    }

    fn view(&self) -> RequestView {
        let [key, model, class, pool, backend, arm] = self.names.clone();
        let [estimate_ms, queue_ms, connect_ms, client_wait_ms, total_ms] = self.spent.map(ms);
        let [ttft_ms, backend_ttft_ms, tpot_ms, e2el_ms, longest_gap_ms] = self.measured.map(|time| time.map(ms));
        let [prompt_tokens, cached_tokens, completion_tokens] = self.tokens;
        RequestView {
            time: format!("{:.3}", self.at),
            request_id: Arc::clone(&self.request_id),
            upstream_id: (self.upstream_id != self.request_id).then(|| Arc::clone(&self.upstream_id)),
            route: self.route.map(|route| route.label().to_owned()),
            key,
            model,
            class,
            pool,
            backend,
            arm,
            stream: self.stream,
            status: self.status,
            outcome: self.outcome.label().to_owned(),
            detail: self.refused.unwrap_or_else(|| self.outcome.detail()).to_owned(),
            retries: self.retries.iter().map(|reason| reason.label().to_owned()).collect(),
            estimate_tokens: self.estimate.map(|estimate| estimate.tokens),
            estimate_how: self.estimate.map(|estimate| estimate.source.label().to_owned()),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            estimate_ms,
            queue_ms,
            connect_ms,
            client_wait_ms,
            ttft_ms,
            backend_ttft_ms,
            engine_queue_ms: self.engine.map(|times| ms(times.queue)),
            engine_prefill_ms: self.engine.map(|times| ms(times.prefill)),
            tpot_ms,
            longest_gap_ms,
            e2el_ms,
            total_ms,
            slo_met: self.slo_met,
        }
    }
}

/// Milliseconds with three decimals.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use sluice_core::openai::ShedReason;

    use super::super::testing::{completed, record};
    use super::*;

    fn kept(requests: &[Record]) -> LastRequests {
        let last = LastRequests::default();
        requests.iter().for_each(|record| last.add(record, Timestamp::UNIX_EPOCH));
        last
    }

    fn named(id: &str, record: Record) -> Record {
        Record { request_id: id.into(), upstream_id: format!("{id}-up").into(), ..record }
    }

    fn taking(ms: u64) -> Record {
        let time = Duration::from_millis(ms);
        Record { total: time, ..completed(time / 2, Duration::from_millis(1)) }
    }

    #[test]
    fn a_request_is_found_by_either_id_with_its_times_and_without_texts_of_the_client() {
        let secret = Record {
            path: Some("/SECRET".into()),
            refused_model: Some("SECRET".into()),
            ..completed(Duration::from_millis(20), Duration::from_millis(5))
        };
        let last = kept(&[named("a", secret), named("b", taking(9)), named("a", taking(7))]);
        let found = last.with_id("a");
        assert_eq!(found.iter().map(|view| view.total_ms).collect::<Vec<_>>(), [7.0, 800.0], "the latest first");
        assert_eq!(last.with_id("a-up"), found);
        let view = &found[1];
        assert_eq!((view.ttft_ms, view.queue_ms, view.tpot_ms), (Some(20.0), 2.0, Some(5.0)));
        assert_eq!((view.prompt_tokens, view.completion_tokens), (Some(100), Some(50)));
        assert_eq!(view.time, "1970-01-01T00:00:00.000Z");
        assert!(!serde_json::to_string(&found).unwrap().contains("SECRET"));
        assert_eq!(last.with_id("c"), []);
    }

    #[test]
    fn the_oldest_is_dropped_when_there_are_too_many_and_failures_stay_longer() {
        let shed = || record(Outcome::Shed(ShedReason::QueueFull));
        let last = kept(&[named("shed", shed()), named("first", taking(1))]);
        for _ in 0..FINISHED_MAX {
            last.add(&named("x", taking(1)), Timestamp::UNIX_EPOCH);
        }
        assert_eq!(last.kept(), (FINISHED_MAX, Some(Timestamp::UNIX_EPOCH)));
        assert_eq!(last.with_id("first"), []);
        assert_eq!(last.with_id("shed")[0].detail, "queue_full");
        assert_eq!(last.with_id("x").len(), SAME_ID_MAX);
        for _ in 0..FAILURES_MAX {
            last.add(&named("y", shed()), Timestamp::UNIX_EPOCH);
        }
        assert_eq!((last.failures(1_000).len(), last.with_id("shed").len()), (FAILURES_MAX, 0));
    }

    #[test]
    fn the_slowest_are_those_that_generate_and_took_longest() {
        let tokenize = Record { route: Some(Route::Tokenize), ..taking(900) };
        let last = kept(&[taking(5), taking(30), tokenize, taking(10), taking(20)]);
        let slowest: Vec<f64> = last.slowest(3).iter().map(|view| view.total_ms).collect();
        assert_eq!(slowest, [30.0, 20.0, 10.0]);
        assert_eq!(last.slowest(100).len(), 4);
    }
}
