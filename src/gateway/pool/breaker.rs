//! The passive half of health: whether a backend's answers say that it is broken.
//!
//! The breaker trips on `limit` failures in a row, or when at least half of the last 32 requests
//! failed and at least [`SAMPLES_MIN`] were seen. The rate is needed because an engine that fails
//! every second of a hundred requests in flight never fails three in a row. The breaker counts
//! requests, not time, so a quiet backend keeps the record. The caller decides which outcomes are
//! failures.

/// Requests that must have been seen before the failure rate counts.
const SAMPLES_MIN: u32 = 20;
/// The window of the failure rate, in requests (bits of the ring).
const WINDOW: u32 = 32;

/// Requests that must have been seen before a backend is called failing.
const FAILING_MIN: u32 = 3;

/// How the last requests of a backend ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentAnswers {
    /// Requests that failed through the backend's fault.
    pub failed: u32,
    /// All requests, at most 32.
    pub seen: u32,
}

impl RecentAnswers {
    /// Whether most of the requests failed.
    pub fn is_failing(self) -> bool {
        self.seen >= FAILING_MIN && self.failed * 2 > self.seen
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Breaker {
    in_a_row: u32,
    seen: u32,
    /// Bit 0 is the latest request; a set bit is a failure.
    ring: u32,
}

impl Breaker {
    pub(super) fn success(&mut self) {
        self.in_a_row = 0;
        self.push(false);
    }

    /// A request failed. Returns whether the breaker trips.
    pub(super) fn failure(&mut self, limit: u32) -> bool {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.push(true);
        self.in_a_row >= limit || (self.seen >= SAMPLES_MIN && self.ring.count_ones() * 2 >= self.seen)
    }

    pub(super) fn recent(&self) -> RecentAnswers {
        RecentAnswers { failed: self.ring.count_ones(), seen: self.seen }
    }

    fn push(&mut self, failed: bool) {
        self.ring = (self.ring << 1) | u32::from(failed);
        self.seen = (self.seen + 1).min(WINDOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_request_failing_trips_by_rate() {
        let mut breaker = Breaker::default();
        let tripped = (0..40).position(|i| {
            if i % 2 == 0 {
                breaker.success();
                return false;
            }
            breaker.failure(3)
        });
        assert_eq!(tripped, Some(19));
    }

    #[test]
    fn a_backend_is_failing_when_most_of_its_recent_answers_failed() {
        let recent = |answers: &[bool]| {
            let mut breaker = Breaker::default();
            answers.iter().for_each(|failed| breaker.push(*failed));
            breaker.recent()
        };
        assert!(!recent(&[true, true]).is_failing(), "two say little");
        assert!(recent(&[true, false, true]).is_failing());
        assert!(!recent(&[true, false, true, false]).is_failing(), "half is not most");
        assert_eq!(recent(&[true; 50]), RecentAnswers { failed: 32, seen: 32 });
    }

    #[test]
    fn a_failure_now_and_then_does_not() {
        let mut breaker = Breaker::default();
        for i in 0..200 {
            if i % 5 == 0 {
                assert!(!breaker.failure(3));
            } else {
                breaker.success();
            }
        }
    }
}
