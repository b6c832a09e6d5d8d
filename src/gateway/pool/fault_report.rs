//! The answer to a report of a backend's fault, and a bound on log lines about faults.
//!
//! So that an engine that breaks every stream does not fill the log, at most [`LINES_PER_MINUTE`]
//! faults of each backend are logged in a minute, and the next line says how many were left out.
//! The line about an ejection is always written, because each ejection lasts twice as long as the
//! one before. Time is a parameter.

use std::time::Duration;

use tokio::time::Instant;

use super::health::Verdict;

/// Faults of one backend that are logged in a minute.
pub(super) const LINES_PER_MINUTE: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);

/// The result of a reported fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultReport {
    /// The effect on the backend's place in rotation.
    pub verdict: Verdict,
    /// Whether to log the fault. The number is how many faults before it were left out; `None`:
    /// this one is left out too.
    pub line: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FaultLines {
    since: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl FaultLines {
    /// Counts a fault; see [`FaultReport::line`].
    pub(super) fn take(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (self.since, self.written) = (Some(now), 0);
        }
        if self.written >= LINES_PER_MINUTE {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_so_many_lines_and_the_next_says_how_many_were_left_out() {
        let start = Instant::now();
        let mut lines = FaultLines::default();
        let written = (0..100).filter(|_| lines.take(start) == Some(0)).count();
        assert_eq!(written, LINES_PER_MINUTE as usize);
        assert_eq!(lines.take(start + WINDOW / 2), None);
        assert_eq!(lines.take(start + WINDOW), Some(91));
        assert_eq!(lines.take(start + WINDOW), Some(0));
    }
}
