//! The requests of the last minutes, as far as a simulation needs them: when they came, how long they waited and how long they were.
//!
//! No prompts and no names except those of adapters. Bounds: [`RECENT_MAX`] requests of the last [`RECENT_SPAN`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::Outcome;

/// The most requests that are kept.
pub const RECENT_MAX: usize = 6_000;
/// How far back they go.
pub const RECENT_SPAN: Duration = Duration::from_secs(600);

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct RecentRequest {
    /// When it arrived.
    pub at: Duration,
    /// How long it waited in the gateway's queue, in all attempts together.
    pub waited: Duration,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens; 0: not known, because it was not served.
    pub output: u32,
    /// The model's name.
    pub model: Option<Arc<str>>,
}

/// See the header of this file.
#[derive(Clone, Debug, Default)]
pub struct Recent(VecDeque<RecentRequest>);

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
        let narrow = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        self.0.push_back(RecentRequest {
            at: now.saturating_sub(record.total),
            waited: record.queue_wait,
            prompt: narrow(prompt),
            output: narrow(output),
            model: record.model.clone(),
        });
        let from = now.saturating_sub(RECENT_SPAN);
        while self.0.len() > RECENT_MAX || self.0.front().is_some_and(|first| first.at < from) {
            self.0.pop_front();
        }
    }

    /// All of them by arrival, those of unknown output with the median of the others.
    pub fn all(&self) -> Vec<RecentRequest> {
        let mut known: Vec<u32> = self.0.iter().map(|one| one.output).filter(|output| *output > 0).collect();
        known.sort_unstable();
        let median = known.get(known.len() / 2).copied().unwrap_or(1);
        let mut all: Vec<_> = self.0.iter().cloned().collect();
        all.iter_mut().filter(|one| one.output == 0).for_each(|one| one.output = median);
        all.sort_by_key(|one| one.at);
        all
    }
}

/// Requests that arrive between `from` and `until`, preceded by those that wait at `from` since earlier, which are moved to `from`:
/// what happens to the others depends on them. Returns also how many these are. Requests in service at `from` are left out, and so
/// are those that have not ended yet.
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
