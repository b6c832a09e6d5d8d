//! How long streams have been generating on a backend, and how many tokens they received: the pace
//! of streams that run, by the gateway's clock.
//!
//! A stream generates from the first token until its lease is returned or its client falls behind.
//! Sums only grow, so the difference between two readings shows the time in between. Bound: fixed
//! size.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Sums since the backend was configured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeSums {
    /// Seconds for which streams generated, all streams together.
    pub seconds: f64,
    /// Tokens that the gateway received in these seconds.
    pub tokens: f64,
}

#[derive(Debug)]
pub(super) struct Decoding {
    epoch: Instant,
    streams: Mutex<Streams>,
    tokens: AtomicU64,
}

#[derive(Debug, Default)]
struct Streams {
    running: u32,
    /// Sum over the running streams of the time between the epoch and the first token.
    begun: Duration,
    /// Time for which ended streams generated.
    ended: Duration,
}

impl Decoding {
    pub(super) fn new(now: Instant) -> Self {
        Self { epoch: now, streams: Mutex::default(), tokens: AtomicU64::new(0) }
    }

    pub(super) fn received(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// A stream begins to generate at `at`.
    pub(super) fn begin(&self, at: Instant) {
        let mut streams = self.streams.lock();
        streams.running += 1;
        streams.begun += at.saturating_duration_since(self.epoch);
    }

    /// The stream that began at `at` ends.
    pub(super) fn end(&self, at: Instant, now: Instant) {
        let mut streams = self.streams.lock();
        streams.running -= 1;
        streams.begun -= at.saturating_duration_since(self.epoch);
        streams.ended += now.saturating_duration_since(at);
    }

    pub(super) fn sums(&self, now: Instant) -> DecodeSums {
        let streams = self.streams.lock();
        let running = (now.saturating_duration_since(self.epoch) * streams.running).saturating_sub(streams.begun);
        DecodeSums {
            seconds: (streams.ended + running).as_secs_f64(),
            tokens: self.tokens.load(Ordering::Relaxed) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_and_ended_streams_count_for_the_time_that_they_generated() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let decoding = Decoding::new(start);
        decoding.begin(at(10));
        decoding.begin(at(14));
        decoding.received(7);
        assert_eq!(decoding.sums(at(20)), DecodeSums { seconds: 16.0, tokens: 7.0 });
        decoding.end(at(10), at(20));
        decoding.received(1);
        assert_eq!(decoding.sums(at(24)), DecodeSums { seconds: 20.0, tokens: 8.0 });
        decoding.end(at(14), at(24));
        assert_eq!(decoding.sums(at(99)), DecodeSums { seconds: 20.0, tokens: 8.0 });
    }
}
