//! The requests of the last minutes, for simulations: arrival, wait, prompt and output.
//!
//! Waiting requests are included. Without them, only the first requests of a growing queue would
//! seem to have arrived. No prompt is kept, and no name except those of models. Bounds:
//! [`RECENT_MAX`], [`RECENT_SPAN`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::Outcome;
use sluice_gateway::pool::WaitingRequest;

/// Ended requests kept.
pub const RECENT_MAX: usize = 6_000;
/// How far back kept requests go.
pub const RECENT_SPAN: Duration = Duration::from_secs(600);

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct RecentRequest {
    /// When it arrived.
    pub at: Duration,
    /// Time in the gateway's queue, all attempts together.
    pub waited: Duration,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens; 0: unknown.
    pub output: u32,
    /// The model's label.
    pub model: Option<Arc<str>>,
}

/// Ended and waiting requests.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    ended: VecDeque<RecentRequest>,
    waiting: Vec<RecentRequest>,
}

impl Recent {
    /// Adds a request that ended at `now`.
    pub fn add(&mut self, record: &Record, now: Duration) {
        let counts = matches!(record.outcome, Outcome::Completed | Outcome::Shed(_) | Outcome::Timeout(_));
        if !record.generates() || record.copy.is_some() || !counts {
            return;
        }
        let estimated = record.estimate.map_or(0, |estimate| estimate.tokens);
        let prompt = Some(record.prompt_tokens()).filter(|tokens| *tokens > 0).unwrap_or(estimated);
        let output = if record.outcome == Outcome::Completed { record.generated_tokens() } else { 0 };
        self.ended.push_back(RecentRequest {
            at: now.saturating_sub(record.total),
            waited: record.queue_wait,
            prompt: narrow(prompt),
            output: narrow(output),
            model: record.model.clone(),
        });
        let from = now.saturating_sub(RECENT_SPAN);
        while self.ended.len() > RECENT_MAX || self.ended.front().is_some_and(|first| first.at < from) {
            self.ended.pop_front();
        }
    }

    /// Replaces the waiting requests, whose models are unknown.
    pub fn note_waiting(&mut self, waiting: &[WaitingRequest], now: Duration) {
        let of = |one: &WaitingRequest| RecentRequest {
            at: now.saturating_sub(one.waited),
            waited: one.waited,
            prompt: narrow(one.prompt_tokens),
            output: 0,
            model: None,
        };
        self.waiting.clear();
        self.waiting.extend(waiting.iter().map(of));
    }

    /// All requests by arrival. Unknown outputs become the median of similar prompts. Requests that
    /// wait since before the first known arrival are moved to it.
    pub fn all(&self) -> Vec<RecentRequest> {
        let first = self.ended.iter().map(|one| one.at).min().unwrap_or_default();
        let waiting = self.waiting.iter().map(|one| RecentRequest { at: one.at.max(first), ..one.clone() });
        let mut all: Vec<_> = self.ended.iter().cloned().chain(waiting).collect();
        let outputs = Outputs::of(&all);
        all.iter_mut().filter(|one| one.output == 0).for_each(|one| one.output = outputs.median(one.prompt));
        all.sort_by_key(|one| one.at);
        all
    }
}

fn narrow(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Output tokens in ascending order, by the power of two of the prompt length.
struct Outputs(BTreeMap<u32, Vec<u32>>);

impl Outputs {
    fn of(requests: &[RecentRequest]) -> Self {
        let mut known: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for one in requests.iter().filter(|one| one.output > 0) {
            known.entry(power(one.prompt)).or_default().push(one.output);
        }
        known.values_mut().for_each(|outputs| outputs.sort_unstable());
        Self(known)
    }

    fn median(&self, prompt: u32) -> u32 {
        let nearest = self.0.iter().min_by_key(|(known, _)| known.abs_diff(power(prompt)));
        nearest.map_or(1, |(_, outputs)| outputs[outputs.len() / 2])
    }
}

fn power(prompt: u32) -> u32 {
    prompt.max(1).ilog2()
}

/// The number of requests that wait at `from`, and the requests to replay: first these, as if they
/// arrived at `from`, then the arrivals until `until`. Requests in service at `from`, or still in
/// service, are left out.
pub(crate) fn with_queue(requests: &[RecentRequest], from: Duration, until: Duration) -> (usize, Vec<RecentRequest>) {
    let waits = |request: &&RecentRequest| request.at < from && request.at + request.waited >= from;
    let moved = |request: &RecentRequest| RecentRequest { at: from, ..request.clone() };
    let mut found: Vec<_> = requests.iter().filter(waits).map(moved).collect();
    let waiting = found.len();
    found.extend(requests.iter().filter(|request| (from..until).contains(&request.at)).cloned());
    (waiting, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_wait_are_as_long_as_similar_ones() {
        let request = |at, prompt, output| RecentRequest {
            at: Duration::from_secs(at),
            waited: Duration::ZERO,
            prompt,
            output,
            model: None,
        };
        let ended = [request(10, 200, 100), request(11, 16_000, 64), request(12, 210, 128), request(13, 180, 0)];
        let mut recent = Recent { ended: ended.into(), waiting: Vec::new() };
        let shown = |recent: &Recent| -> Vec<_> {
            recent.all().iter().map(|one| (one.at.as_secs(), one.waited.as_secs(), one.prompt, one.output)).collect()
        };
        assert_eq!(shown(&recent), [(10, 0, 200, 100), (11, 0, 16_000, 64), (12, 0, 210, 128), (13, 0, 180, 128)]);
        let waiting = |waited, prompt_tokens| WaitingRequest { waited: Duration::from_secs(waited), prompt_tokens };
        recent.note_waiting(&[waiting(99, 17_000), waiting(8, 16_000), waiting(9, 900)], Duration::from_secs(20));
        let with =
            [(10, 99, 17_000, 64), (11, 0, 16_000, 64), (11, 9, 900, 128), (12, 0, 210, 128), (12, 8, 16_000, 64)];
        assert_eq!(shown(&recent)[1..6], with);
        recent.note_waiting(&[], Duration::from_secs(21));
        assert_eq!(shown(&recent).len(), 4);
        assert_eq!(Outputs::of(&[]).median(5), 1);
    }

    #[test]
    fn requests_that_wait_since_earlier_come_first() {
        let seconds = Duration::from_secs;
        let request = |at, waited, prompt| RecentRequest {
            at: seconds(at),
            waited: seconds(waited),
            prompt,
            output: 1,
            model: None,
        };
        let all = [
            request(10, 200, 1),
            request(20, 79, 2),
            request(30, 80, 3),
            request(100, 0, 4),
            request(199, 50, 5),
            request(200, 0, 6),
        ];
        let (waiting, found) = with_queue(&all, seconds(100), seconds(200));
        assert_eq!(waiting, 2);
        let found: Vec<_> = found.iter().map(|one| (one.at.as_secs(), one.prompt)).collect();
        assert_eq!(found, [(100, 1), (100, 3), (100, 4), (199, 5)]);
    }
}
