//! The requests of the last hour by class and pool: counts, latency, and the parts of the time
//! before the first token.
//!
//! Intervals of [`FINE_SECONDS`] cover the last five minutes, of [`COARSE_SECONDS`] the last hour.
//! A request counts in the interval in which it ended. [`span`](super::span) has the counts.
//!
//! Bounds: a pair of class and pool ([`super::series`]) keeps at most 120 intervals of 9 KiB,
//! usually under 200 KiB in all. Time is a parameter: seconds since any moment.

use std::collections::VecDeque;
use std::time::Duration;

use super::span::Span;
use crate::flow::Record;

pub(super) const FINE_SECONDS: u64 = 5;
pub(super) const COARSE_SECONDS: u64 = 60;
/// Intervals of each length that are shown, the current one included.
pub(super) const INTERVALS: u64 = 60;

/// An interval with its number.
type Numbered = (u64, Span);

#[derive(Debug, Default)]
pub(super) struct History {
    /// Oldest first; the last one is in progress. Intervals without a request are absent.
    fine: VecDeque<Numbered>,
    /// The requests of `fine`, except those in the last fine interval.
    coarse: VecDeque<Numbered>,
}

/// The length of intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// 5 s each, for the last five minutes.
    Fine,
    /// A minute each, for the last hour.
    Coarse,
}

impl Resolution {
    pub(super) fn seconds(self) -> u64 {
        match self {
            Self::Fine => FINE_SECONDS,
            Self::Coarse => COARSE_SECONDS,
        }
    }

    pub(super) fn number(self, at: Duration) -> u64 {
        at.as_secs() / self.seconds()
    }
}

impl History {
    /// Counts a request that ended at `at`. A time before the last one counts as the last one.
    pub(super) fn add(&mut self, record: &Record, at: Duration) {
        let number = Resolution::Fine.number(at);
        if self.fine.back().is_none_or(|(last, _)| *last < number) {
            self.close();
            self.fine.push_back((number, Span::default()));
            drop_old(&mut self.fine, number);
        }
        if let Some((_, span)) = self.fine.back_mut() {
            span.count(record);
        }
    }

    /// Adds the last fine interval, which has ended, to the coarse interval.
    fn close(&mut self) {
        let Some((number, span)) = self.fine.back_mut() else { return };
        span.shrink();
        let number = *number * FINE_SECONDS / COARSE_SECONDS;
        if self.coarse.back().is_none_or(|(last, _)| *last < number) {
            if let Some((_, ended)) = self.coarse.back_mut() {
                ended.shrink();
            }
            self.coarse.push_back((number, Span::default()));
            drop_old(&mut self.coarse, number);
        }
        if let Some((_, sum)) = self.coarse.back_mut() {
            sum.add(span);
        }
    }

    /// Adds the intervals as of `at` to `sums`, which has [`INTERVALS`] places, the last one for
    /// the interval in progress.
    pub(super) fn add_to(&self, sums: &mut [Span], resolution: Resolution, at: Duration) {
        let now = resolution.number(at);
        let mut put = |number: u64, span: &Span| {
            let age = now.saturating_sub(number);
            let place = INTERVALS.checked_sub(age + 1).and_then(|place| sums.get_mut(place as usize));
            if let Some(sum) = place {
                sum.add(span);
            }
        };
        match resolution {
            Resolution::Fine => self.fine.iter().for_each(|(number, span)| put(*number, span)),
            Resolution::Coarse => {
                self.coarse.iter().for_each(|(number, span)| put(*number, span));
                if let Some((number, span)) = self.fine.back() {
                    put(number * FINE_SECONDS / COARSE_SECONDS, span);
                }
            }
        }
    }
}

fn drop_old(intervals: &mut VecDeque<Numbered>, now: u64) {
    while intervals.front().is_some_and(|(number, _)| number + INTERVALS <= now) {
        intervals.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use sluice_core::openai::ShedReason;
    use smallvec::smallvec;

    use super::super::recent::BINS;
    use super::super::testing::{completed, record};
    use super::*;
    use crate::flow::Outcome;
    use crate::flow::record::RetryReason;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn spans(history: &History, resolution: Resolution, now: u64) -> Vec<Span> {
        let mut spans = vec![Span::default(); INTERVALS as usize];
        history.add_to(&mut spans, resolution, at(now));
        spans
    }

    fn sum(spans: &[Span]) -> Span {
        spans.iter().fold(Span::default(), |mut sum, span| {
            sum.add(span);
            sum
        })
    }

    #[test]
    fn a_request_is_in_the_interval_in_which_it_ended_for_five_minutes_and_for_an_hour() {
        let mut history = History::default();
        for second in [0, 4, 5, 59, 60] {
            history.add(&completed(MS(20), MS(5)), at(second));
        }
        let places = |resolution, now| -> Vec<(usize, u32)> {
            let spans = spans(&history, resolution, now);
            spans.iter().map(|span| span.completed).enumerate().filter(|(_, n)| *n > 0).collect()
        };
        assert_eq!(places(Resolution::Fine, 60), [(47, 2), (48, 1), (58, 1), (59, 1)]);
        assert_eq!(places(Resolution::Coarse, 60), [(58, 4), (59, 1)]);
        assert_eq!(places(Resolution::Fine, 299), [(0, 2), (1, 1), (11, 1), (12, 1)]);
        assert_eq!(places(Resolution::Fine, 305), [(9, 1), (10, 1)]);
        assert_eq!(places(Resolution::Coarse, 3_599), [(0, 4), (1, 1)]);
        assert_eq!(places(Resolution::Coarse, 3_600), [(0, 1)]);
        assert_eq!(places(Resolution::Coarse, 9_000), []);
    }

    #[test]
    fn what_is_kept_is_bounded_however_long_it_runs_and_whatever_the_times() {
        let mut history = History::default();
        for step in 0..20_000u64 {
            let time = Duration::from_micros(100 + step * step % 90_000_000);
            history.add(&completed(time, time), at(step));
        }
        assert!(history.fine.len() <= INTERVALS as usize && history.coarse.len() <= INTERVALS as usize);
        assert!(history.fine.iter().chain(&history.coarse).all(|(_, span)| span.bins() <= BINS));
        let hour = sum(&spans(&history, Resolution::Coarse, 19_999));
        assert_eq!(hour.completed, 3_560, "59 minutes and the one in progress");
    }

    #[test]
    fn quantiles_are_right_within_five_percent() {
        let mut history = History::default();
        for ms in 1..=1_000 {
            history.add(&completed(MS(ms), MS(ms)), at(ms / 10));
        }
        let all = sum(&spans(&history, Resolution::Fine, 100));
        for (name, found) in [("ttft", all.ttft(&[0.5, 0.99])), ("tpot", all.tpot(&[0.5, 0.99]))] {
            let found = found.unwrap();
            let near = |want: f64, got: f64| (got / want - 1.0).abs() < 0.05;
            assert!(near(500.0, found[0]) && near(990.0, found[1]), "{name}: {found:?}");
        }
        // Each request has 49 gaps. The bounds of the buckets there are 250 ms, 500 ms and 1 s.
        let itl = all.itl(&[0.25, 0.5]).unwrap();
        assert!((itl[0] / 250.0 - 1.0).abs() < 0.01 && (itl[1] / 500.0 - 1.0).abs() < 0.01, "{itl:?}");
        assert_eq!(Span::default().ttft(&[0.5]), None);
    }

    #[test]
    fn the_parts_of_slow_first_tokens_are_theirs_and_add_up() {
        let mut history = History::default();
        let with = |ttft, queue, backend| Record {
            queue_wait: MS(queue),
            connect_time: MS(1),
            client_wait: Duration::ZERO,
            held_up: false,
            backend_ttft: Some(MS(backend)),
            ..completed(MS(ttft), MS(5))
        };
        for _ in 0..95 {
            history.add(&with(20, 0, 17), at(1));
        }
        for _ in 0..5 {
            history.add(&with(2_000, 1_900, 90), at(1));
        }
        let all = sum(&spans(&history, Resolution::Fine, 2));
        let [mean, typical, slow] = all.first_tokens(0.96);
        assert_eq!((mean.count, typical.count, slow.count), (100, 95, 5));
        let near = |a: f32, b: f32| (a / b - 1.0).abs() < 1e-4;
        assert!(near(slow.queue, 9.5) && near(slow.backend, 0.45) && near(slow.connect, 0.005), "{slow:?}");
        assert!(near(typical.ttft, 1.9) && typical.queue == 0.0, "{typical:?}");
        assert!(near(mean.ttft, 11.9), "{mean:?}");
    }

    #[test]
    fn reasons_objectives_and_estimates_are_counted() {
        let mut history = History::default();
        history.add(&Record { slo_met: Some(false), ..record(Outcome::Shed(ShedReason::QueueFull)) }, at(0));
        history.add(&record(Outcome::Refused), at(0));
        history.add(&Record { retries: smallvec![RetryReason::Connect; 2], ..completed(MS(9), MS(5)) }, at(1));
        history.add(&Record { slo_met: Some(false), ..completed(MS(9), MS(5)) }, at(7));
        let all = sum(&spans(&history, Resolution::Coarse, 8));
        assert_eq!(all.reasons, [(Outcome::Shed(ShedReason::QueueFull), 1)]);
        assert_eq!(all.retries, [(RetryReason::Connect, 2)]);
        assert_eq!((all.judged, all.met, all.refused, all.ended()), (3, 1, 1, 4));
        // The estimates are 110 for 100 tokens, so the ratio is a little over 1.1.
        assert_eq!((all.estimated, all.near), (2, 0));
        assert!((all.ratio(&[0.5]).unwrap()[0] / 1.1 - 1.0).abs() < 0.05);
    }
}
