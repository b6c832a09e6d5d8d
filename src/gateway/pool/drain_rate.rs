//! How fast requests leave a pool, for an honest `Retry-After`.
//!
//! The rate is departures per second, averaged exponentially over about [`MEMORY`]. Only time in
//! which a request waits counts, because the departures of a quiet hour say nothing about a full
//! queue. Results are whole seconds from [`RETRY_AFTER_MIN`] to [`RETRY_AFTER_MAX`], because
//! clients obey the header.

use std::time::Duration;

use tokio::time::Instant;

use sluice_config::limits::{RETRY_AFTER_MAX, RETRY_AFTER_MIN};

const MEMORY: Duration = Duration::from_secs(10);
/// Shorter spans give no useful rate.
const SPAN_MIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct DrainRate {
    since: Instant,
    departed: u64,
    per_second: Option<f64>,
}

impl DrainRate {
    /// The answer before anything has been measured.
    pub(super) const UNKNOWN: Duration = Duration::from_secs(5);

    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, departed: 0, per_second: None }
    }

    /// The first request begins to wait: earlier time does not count.
    pub(super) fn begin(&mut self, now: Instant) {
        self.since = now;
        self.departed = 0;
    }

    /// No request waits: drops the span if it is longer than the memory, since part of it was idle.
    pub(super) fn leave_out_idle(&mut self, now: Instant) {
        if now.saturating_duration_since(self.since) > MEMORY {
            self.begin(now);
        }
    }

    pub(super) fn departed(&mut self) {
        self.departed += 1;
    }

    pub(super) fn time_for(&mut self, count: usize, now: Instant) -> Duration {
        self.fold(now);
        match self.per_second {
            Some(rate) if rate > 0.0 => {
                let seconds = (count as f64 / rate).ceil().min(RETRY_AFTER_MAX.as_secs_f64());
                Duration::from_secs_f64(seconds).max(RETRY_AFTER_MIN)
            }
            _ => Self::UNKNOWN,
        }
    }

    fn fold(&mut self, now: Instant) {
        let span = now.saturating_duration_since(self.since);
        if span < SPAN_MIN {
            return;
        }
        let sample = self.departed as f64 / span.as_secs_f64();
        let weight = 1.0 - (-span.as_secs_f64() / MEMORY.as_secs_f64()).exp();
        self.per_second = Some(match self.per_second {
            None => sample,
            Some(mean) => mean + weight * (sample - mean),
        });
        self.since = now;
        self.departed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_the_queue_over_the_rate() {
        let start = Instant::now();
        let mut drain = DrainRate::new(start);
        assert_eq!(drain.time_for(1, start), DrainRate::UNKNOWN);
        (0..40).for_each(|_| drain.departed());
        // 40 in 10 s are 4 a second: 30 requests take 7.5 s.
        assert_eq!(drain.time_for(30, start + Duration::from_secs(10)), Duration::from_secs(8));
        assert_eq!(drain.time_for(1, start + Duration::from_secs(10)), Duration::from_secs(1));
        assert_eq!(drain.time_for(100_000, start + Duration::from_secs(10)), RETRY_AFTER_MAX);
    }
}
