//! The last hour of requests by class and pool: counts, latency, and where the time before the first token went.
//!
//! Two resolutions: intervals of [`FINE_SECONDS`] for the last five minutes and of [`COARSE_SECONDS`] for the last hour. A request is
//! counted in the interval in which it ended. An interval keeps the bins that are not empty (see [`recent`](super::recent): right
//! within 5 %), so a quiet one costs nothing. Gaps between tokens keep the buckets that each stream has counted them in.
//!
//! A bin of TTFT also has the sums of its parts, so the parts of the slowest requests are known, not only those of the average:
//! time in queues, time to connect, the wait for the backend (its queue and the prefill), and the rest (estimate, sending,
//! attempts that failed). The four add up to TTFT.
//!
//! Bounds: one pair of class and pool keeps at most 120 intervals. With every bin in use one takes 9 KiB, so a pair 1.1 MiB; usually a
//! pair has under 200 KiB. [`super::series`] bounds the pairs. Time is a parameter: seconds since any moment.

use std::collections::VecDeque;
use std::time::Duration;

use super::recent::{BINS, bin, middle_ms};
use crate::flow::record::RetryReason;
use crate::flow::{Outcome, Record};
use sluice_core::meter::ITL_BUCKETS_SECONDS;

/// Length of a fine interval, seconds.
pub(super) const FINE_SECONDS: u64 = 5;
/// Length of a coarse one.
pub(super) const COARSE_SECONDS: u64 = 60;
/// Intervals of each length that are shown, the one in progress included.
pub(super) const INTERVALS: u64 = 60;
/// Bins of the estimate's ratio: 16 per doubling, from 1/16 to 16.
const RATIO_BINS: usize = 128;
const RATIOS_PER_OCTAVE: f64 = 16.0;
/// An estimate within this share of the actual length counts as near.
const NEAR: f64 = 0.1;

/// Values by bin, in ascending order, without empty bins. As many bins as the caller's function has.
#[derive(Clone, Debug)]
struct Sparse<T>(Vec<(u8, T)>);

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Default> Sparse<T> {
    fn at(&mut self, bin: usize) -> &mut T {
        // Every kind of bin has fewer than 256.
        let bin = bin as u8;
        let found = self.0.binary_search_by_key(&bin, |(own, _)| *own);
        let place = found.unwrap_or_else(|place| {
            self.0.insert(place, (bin, T::default()));
            place
        });
        &mut self.0[place].1
    }

    /// Gives back room for bins that did not come.
    fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    fn add_all(&mut self, other: &Self, add: fn(&mut T, &T)) {
        for (bin, value) in &other.0 {
            add(self.at(usize::from(*bin)), value);
        }
    }
}

/// Requests whose TTFT fell into one bin; sums of seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct FirstTokens {
    pub(super) count: u32,
    pub(super) ttft: f32,
    pub(super) queue: f32,
    pub(super) connect: f32,
    pub(super) backend: f32,
}

impl FirstTokens {
    pub(super) fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.ttft += other.ttft;
        self.queue += other.queue;
        self.connect += other.connect;
        self.backend += other.backend;
    }
}

/// Requests that ended in one span of time.
#[derive(Clone, Debug, Default)]
pub(super) struct Span {
    pub(super) completed: u32,
    pub(super) shed: u32,
    pub(super) failed: u32,
    pub(super) client_gone: u32,
    pub(super) refused: u32,
    pub(super) prompt: u64,
    pub(super) generation: u64,
    /// Generating requests that had objectives and completed, and those of them that met all.
    pub(super) judged: u32,
    pub(super) met: u32,
    /// Estimates that could be compared, and those that were near.
    pub(super) estimated: u32,
    pub(super) near: u32,
    /// Why requests were shed or failed; a closed set.
    pub(super) reasons: Vec<(Outcome, u32)>,
    /// Why attempts were repeated; a closed set.
    pub(super) retries: Vec<(RetryReason, u32)>,
    ttft: Sparse<FirstTokens>,
    tpot: Sparse<u32>,
    e2el: Sparse<u32>,
    itl: Sparse<u32>,
    ratio: Sparse<u32>,
}

/// An interval, by its number since the beginning.
type Numbered = (u64, Span);

/// One pair of class and pool.
#[derive(Debug, Default)]
pub(super) struct History {
    /// The oldest first, the one in progress last. Intervals without a request are absent.
    fine: VecDeque<Numbered>,
    /// Has what `fine` has, except what is in its last interval.
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

    /// The number of the interval that `at` is in.
    pub(super) fn number(self, at: Duration) -> u64 {
        at.as_secs() / self.seconds()
    }
}

impl History {
    /// Counts a request that ended at `at`. A time before the last one counts as that one.
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

    /// Adds the last fine interval, which has ended, to its coarse one.
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

    /// Adds the intervals at `at` to `sums`, which has [`INTERVALS`] places; the last one is in progress.
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

impl Span {
    fn count(&mut self, record: &Record) {
        match record.outcome {
            Outcome::Completed => self.completed += 1,
            Outcome::ClientGone => self.client_gone += 1,
            Outcome::Refused => self.refused += 1,
            Outcome::Shed(_) => self.shed += 1,
            Outcome::UpstreamError(_) | Outcome::Timeout(_) => self.failed += 1,
        }
        if !record.outcome.detail().is_empty() {
            add_to_list(&mut self.reasons, record.outcome, 1);
        }
        record.retries.iter().for_each(|reason| add_to_list(&mut self.retries, *reason, 1));
        let Some(stats) = &record.stats else { return };
        self.prompt += record.prompt_tokens();
        self.generation += record.generated_tokens();
        if let (Some(estimate), Some(actual @ 1..)) = (&record.estimate, stats.usage.prompt) {
            let ratio = estimate.tokens as f64 / actual as f64;
            self.estimated += 1;
            self.near += u32::from((ratio - 1.0).abs() <= NEAR);
            *self.ratio.at(ratio_bin(ratio)) += 1;
        }
        if !record.generates() {
            return;
        }
        if record.stream {
            if let Some(ttft) = stats.ttft {
                let seconds = |time: Duration| time.as_secs_f32();
                self.ttft.at(bin(ttft)).add(&FirstTokens {
                    count: 1,
                    ttft: seconds(ttft),
                    queue: seconds(record.queue_wait),
                    connect: seconds(record.connect_time),
                    backend: record.backend_ttft.map_or(0.0, seconds),
                });
            }
            for (bucket, count) in stats.itl.counts().iter().enumerate().filter(|(_, count)| **count > 0) {
                let sum = self.itl.at(bucket);
                *sum = sum.saturating_add(*count);
            }
        }
        if record.outcome != Outcome::Completed {
            return;
        }
        if let Some(met) = record.slo_met {
            self.judged += 1;
            self.met += u32::from(met);
        }
        *self.e2el.at(bin(stats.e2el.unwrap_or(record.total))) += 1;
        if let Some(tpot) = stats.tpot {
            *self.tpot.at(bin(tpot)) += 1;
        }
    }

    /// Adds what another span has.
    pub(super) fn add(&mut self, other: &Self) {
        self.completed += other.completed;
        self.shed += other.shed;
        self.failed += other.failed;
        self.client_gone += other.client_gone;
        self.refused += other.refused;
        self.prompt += other.prompt;
        self.generation += other.generation;
        self.judged += other.judged;
        self.met += other.met;
        self.estimated += other.estimated;
        self.near += other.near;
        other.reasons.iter().for_each(|(reason, count)| add_to_list(&mut self.reasons, *reason, *count));
        other.retries.iter().for_each(|(reason, count)| add_to_list(&mut self.retries, *reason, *count));
        self.ttft.add_all(&other.ttft, FirstTokens::add);
        let sum = |own: &mut u32, more: &u32| *own = own.saturating_add(*more);
        self.tpot.add_all(&other.tpot, sum);
        self.e2el.add_all(&other.e2el, sum);
        self.itl.add_all(&other.itl, sum);
        self.ratio.add_all(&other.ratio, sum);
    }

    fn shrink(&mut self) {
        self.ttft.shrink();
        [&mut self.tpot, &mut self.e2el, &mut self.itl, &mut self.ratio].into_iter().for_each(Sparse::shrink);
    }

    /// All requests that ended.
    pub(super) fn ended(&self) -> u64 {
        [self.completed, self.shed, self.failed, self.client_gone, self.refused].into_iter().map(u64::from).sum()
    }

    /// Quantiles of TTFT, milliseconds.
    pub(super) fn ttft(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.ttft.0.iter().map(|(bin, tokens)| (*bin, tokens.count)), shares, middle)
    }

    /// Quantiles of TPOT, milliseconds.
    pub(super) fn tpot(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.tpot.0.iter().copied(), shares, middle)
    }

    /// Quantiles of E2EL, milliseconds.
    pub(super) fn e2el(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.e2el.0.iter().copied(), shares, middle)
    }

    /// Quantiles of ITL, milliseconds, interpolated within their bucket.
    pub(super) fn itl(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.itl.0.iter().copied(), shares, |bucket, inside| {
            let bucket = usize::from(bucket);
            let last = ITL_BUCKETS_SECONDS.len() - 1;
            let upper = ITL_BUCKETS_SECONDS[bucket.min(last)];
            let lower = bucket.checked_sub(1).map_or(0.0, |below| ITL_BUCKETS_SECONDS[below.min(last)]);
            (lower + (upper - lower) * inside) * 1e3
        })
    }

    /// Quantiles of the estimated over the actual length of prompts.
    pub(super) fn ratio(&self, shares: &[f64]) -> Option<Vec<f64>> {
        let middle = |bin: u8, _: f64| ((f64::from(bin) + 0.5 - RATIO_BINS as f64 / 2.0) / RATIOS_PER_OCTAVE).exp2();
        quantiles(self.ratio.0.iter().copied(), shares, middle)
    }

    /// First tokens: all of them, those up to the bin of the median, and those from the bin of this quantile on.
    pub(super) fn first_tokens(&self, slow: f64) -> [FirstTokens; 3] {
        let all = self.ttft.0.iter().fold(FirstTokens::default(), |mut sum, (_, bin)| {
            sum.add(bin);
            sum
        });
        let [mut typical, mut slowest] = [FirstTokens::default(); 2];
        let mut seen = 0.0;
        for (_, bin) in &self.ttft.0 {
            if seen < f64::from(all.count) * 0.5 {
                typical.add(bin);
            }
            seen += f64::from(bin.count);
            if seen >= f64::from(all.count) * slow {
                slowest.add(bin);
            }
        }
        [all, typical, slowest]
    }
}

fn middle(bin: u8, _: f64) -> f64 {
    middle_ms(usize::from(bin).min(BINS - 1))
}

fn ratio_bin(ratio: f64) -> usize {
    let octaves = ratio.max(1e-6).log2();
    ((octaves * RATIOS_PER_OCTAVE + RATIO_BINS as f64 / 2.0).max(0.0) as usize).min(RATIO_BINS - 1)
}

fn add_to_list<T: PartialEq>(list: &mut Vec<(T, u32)>, what: T, count: u32) {
    match list.iter_mut().find(|(own, _)| *own == what) {
        Some((_, sum)) => *sum += count,
        None => list.push((what, count)),
    }
}

/// The values below which these shares lie, ascending. `value` has a bin and how far into its counts the quantile is, 0 to 1.
fn quantiles(
    bins: impl Iterator<Item = (u8, u32)> + Clone,
    shares: &[f64],
    value: impl Fn(u8, f64) -> f64,
) -> Option<Vec<f64>> {
    let all: u64 = bins.clone().map(|(_, count)| u64::from(count)).sum();
    if all == 0 {
        return None;
    }
    let quantile = |share: f64| {
        let rank = (all as f64 * share).max(f64::MIN_POSITIVE);
        let mut seen = 0.0;
        for (bin, count) in bins.clone() {
            let count = f64::from(count);
            if seen + count >= rank {
                return value(bin, (rank - seen) / count);
            }
            seen += count;
        }
        0.0
    };
    Some(shares.iter().map(|share| quantile(*share)).collect())
}

#[cfg(test)]
mod tests {
    use sluice_core::openai::ShedReason;
    use smallvec::smallvec;

    use super::super::testing::{completed, record};
    use super::*;

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
        let bins = |span: &Span| span.ttft.0.len().max(span.e2el.0.len()).max(span.itl.0.len()).max(span.ratio.0.len());
        assert!(history.fine.iter().chain(&history.coarse).all(|(_, span)| bins(span) <= BINS));
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
        // 49 gaps each; buckets are 250 ms to 500 ms to 1 s there.
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
        history.add(&record(Outcome::Shed(ShedReason::QueueFull)), at(0));
        history.add(&record(Outcome::Refused), at(0));
        history.add(&Record { retries: smallvec![RetryReason::Connect; 2], ..completed(MS(9), MS(5)) }, at(1));
        history.add(&Record { slo_met: Some(false), ..completed(MS(9), MS(5)) }, at(7));
        let all = sum(&spans(&history, Resolution::Coarse, 8));
        assert_eq!(all.reasons, [(Outcome::Shed(ShedReason::QueueFull), 1)]);
        assert_eq!(all.retries, [(RetryReason::Connect, 2)]);
        assert_eq!((all.judged, all.met, all.refused, all.ended()), (2, 1, 1, 4));
        // The estimate of 110 for 100 tokens is off by a tenth.
        assert_eq!((all.estimated, all.near), (2, 0 + u32::from((110.0f64 / 100.0 - 1.0).abs() <= NEAR) * 2));
        assert!((all.ratio(&[0.5]).unwrap()[0] / 1.1 - 1.0).abs() < 0.05);
    }
}
