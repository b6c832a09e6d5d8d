//! The data-parallel ranks of a server: engines with separate queues, KV caches and statistics
//! behind one HTTP side.
//!
//! A request goes to the rank that the header `X-data-parallel-rank` names, otherwise to the rank
//! with the lowest load as vLLM counts it: [`WAITING_WEIGHT`] for a waiting sequence, 1 for a
//! running one. Gauges change when a step ends, so sequences submitted since then count as waiting.
//! Bound: [`MAX_RANKS`](crate::process::config::MAX_RANKS).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};

use super::command::Command;
use crate::observe::stats::Stats;

/// A waiting sequence counts as this many running sequences.
const WAITING_WEIGHT: usize = 4;

/// One engine of a server.
#[derive(Debug, Default)]
pub(crate) struct Rank {
    pub(crate) stats: Mutex<Stats>,
    /// Number of sequences ever submitted.
    submitted: AtomicUsize,
    /// Number of submitted sequences that the gauges include.
    counted: AtomicUsize,
    pub(super) inbox: Mutex<Vec<Command>>,
    /// The KV events of the engine, if it publishes them.
    pub(crate) kv_messages: OnceLock<broadcast::Sender<Arc<[u8]>>>,
    /// Signalled when a command is added to the inbox.
    pub(super) arrived: Notify,
}

impl Rank {
    /// Adds a command to the inbox and wakes the engine loop.
    pub(crate) fn send(&self, command: Command) {
        if let Command::Submit(submissions, _) = &command {
            self.submitted.fetch_add(submissions.len(), Ordering::Relaxed);
        }
        self.inbox.lock().push(command);
        self.arrived.notify_one();
    }

    /// Takes the commands that have arrived.
    pub(super) fn commands(&self) -> Vec<Command> {
        std::mem::take(&mut *self.inbox.lock())
    }

    /// Notes that gauges were published that include the first `submitted` sequences.
    pub(super) fn published(&self, submitted: usize) {
        self.counted.store(submitted, Ordering::Relaxed);
    }

    fn load(&self) -> usize {
        let gauges = self.stats.lock().gauges;
        let fresh = self.submitted.load(Ordering::Relaxed).saturating_sub(self.counted.load(Ordering::Relaxed));
        WAITING_WEIGHT * (gauges.waiting + gauges.deferred + fresh) + gauges.running
    }
}

/// The position of the rank with the lowest load; of several, the first from `start` on.
pub(super) fn least_loaded(ranks: &[impl AsRef<Rank>], start: usize) -> usize {
    let order = (0..ranks.len()).map(|step| (start + step) % ranks.len());
    order.min_by_key(|rank| ranks[*rank].as_ref().load()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Request;
    use crate::http::wire::Finish;
    use crate::observe::stats::Gauges;
    use crate::real_time::command::Submission;
    use crate::real_time::output_collector::OutputCollector;

    #[test]
    fn a_waiting_sequence_counts_as_four_running_ones() {
        let rank = |running, waiting| {
            let rank = Rank::default();
            rank.stats.lock().gauges = Gauges { running, waiting, ..Gauges::default() };
            Arc::new(rank)
        };
        assert_eq!(least_loaded(&[rank(5, 0), rank(0, 1), rank(3, 1)], 0), 1);
        assert_eq!(least_loaded(&[rank(4, 0), rank(0, 1)], 0), 0);
        assert_eq!(least_loaded(&[rank(4, 0), rank(0, 1)], 1), 1);
        let submission =
            Submission { request: Request::default(), finish: Finish::Stop, max_tokens: 1, n: 1, session: None };
        let ranks = [rank(2, 0), rank(3, 0)];
        ranks[0].send(Command::Submit(vec![submission], Arc::new(OutputCollector::new(1, 1))));
        assert_eq!(least_loaded(&ranks, 0), 1, "a sequence that no gauge shows yet waits");
        ranks[0].published(1);
        assert_eq!(least_loaded(&ranks, 1), 0);
    }
}
