//! Counts of the requests that ended in one span of time.
//!
//! Only non-empty bins are kept (see [`recent`](super::recent)), so a quiet span costs nothing.
//! Gaps between tokens keep the buckets of `ItlHistogram`.
//!
//! A bin of TTFT also has the sums of its four parts, so the parts of the slowest requests are
//! known: time in queues, time to connect, the wait for the backend (queue and prefill), and the
//! rest (estimate, sending, failed attempts).
//!
//! Bounds: 9 KiB with every bin in use.

use std::time::Duration;

use super::recent::{BINS, bin, middle_ms};
use crate::flow::record::RetryReason;
use crate::flow::{Outcome, Record};
use sluice_core::meter::ITL_BUCKETS_SECONDS;

/// Bins of the estimate's ratio: 16 per doubling, from 1/16 to 16.
const RATIO_BINS: usize = 128;
const RATIOS_PER_OCTAVE: f64 = 16.0;
/// An estimate within this share of the actual length counts as near.
const NEAR: f64 = 0.1;

/// Values by bin, in ascending order, without empty bins; the bin function bounds their number.
#[derive(Clone, Debug)]
struct Sparse<T>(Vec<(u8, T)>);

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Default> Sparse<T> {
    fn at(&mut self, bin: usize) -> &mut T {
        // There are fewer than 256 bins of each kind.
        let bin = bin as u8;
        let found = self.0.binary_search_by_key(&bin, |(own, _)| *own);
        let place = found.unwrap_or_else(|place| {
            self.0.insert(place, (bin, T::default()));
            place
        });
        &mut self.0[place].1
    }

    fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    fn add_all(&mut self, other: &Self, add: fn(&mut T, &T)) {
        for (bin, value) in &other.0 {
            add(self.at(usize::from(*bin)), value);
        }
    }
}

/// The requests in one bin of TTFT: the number, and the sums of the requests' times in seconds.
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

#[derive(Clone, Debug, Default)]
pub(super) struct Span {
    pub(super) completed: u32,
    pub(super) shed: u32,
    pub(super) failed: u32,
    pub(super) client_gone: u32,
    pub(super) refused: u32,
    pub(super) prompt: u64,
    pub(super) generation: u64,
    /// Requests that were judged by objectives, and requests that met all.
    pub(super) judged: u32,
    pub(super) met: u32,
    /// Estimates that could be compared, and estimates that were near.
    pub(super) estimated: u32,
    pub(super) near: u32,
    /// Reasons why requests were shed or failed; a closed set.
    pub(super) reasons: Vec<(Outcome, u32)>,
    /// Reasons why attempts were repeated; a closed set.
    pub(super) retries: Vec<(RetryReason, u32)>,
    ttft: Sparse<FirstTokens>,
    tpot: Sparse<u32>,
    e2el: Sparse<u32>,
    itl: Sparse<u32>,
    ratio: Sparse<u32>,
}

impl Span {
    pub(super) fn count(&mut self, record: &Record) {
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
        if let Some(met) = record.slo_met {
            self.judged += 1;
            self.met += u32::from(met);
        }
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
        if let Some(e2el) = record.e2el() {
            *self.e2el.at(bin(e2el)) += 1;
        }
        if let Some(tpot) = stats.tpot {
            *self.tpot.at(bin(tpot)) += 1;
        }
    }

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

    pub(super) fn shrink(&mut self) {
        self.ttft.shrink();
        [&mut self.tpot, &mut self.e2el, &mut self.itl, &mut self.ratio].into_iter().for_each(Sparse::shrink);
    }

    pub(super) fn ended(&self) -> u64 {
        [self.completed, self.shed, self.failed, self.client_gone, self.refused].into_iter().map(u64::from).sum()
    }

    pub(super) fn ttft(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.ttft.0.iter().map(|(bin, tokens)| (*bin, tokens.count)), shares, middle)
    }

    pub(super) fn tpot(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.tpot.0.iter().copied(), shares, middle)
    }

    pub(super) fn e2el(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.e2el.0.iter().copied(), shares, middle)
    }

    /// Quantiles of ITL, milliseconds, interpolated within a bucket.
    pub(super) fn itl(&self, shares: &[f64]) -> Option<Vec<f64>> {
        quantiles(self.itl.0.iter().copied(), shares, |bucket, inside| {
            let bucket = usize::from(bucket);
            let last = ITL_BUCKETS_SECONDS.len() - 1;
            let upper = ITL_BUCKETS_SECONDS[bucket.min(last)];
            let lower = bucket.checked_sub(1).map_or(0.0, |below| ITL_BUCKETS_SECONDS[below.min(last)]);
            (lower + (upper - lower) * inside) * 1e3
        })
    }

    pub(super) fn ratio(&self, shares: &[f64]) -> Option<Vec<f64>> {
        let middle = |bin: u8, _: f64| ((f64::from(bin) + 0.5 - RATIO_BINS as f64 / 2.0) / RATIOS_PER_OCTAVE).exp2();
        quantiles(self.ratio.0.iter().copied(), shares, middle)
    }

    /// First tokens of three groups of requests: all, up to the bin of the median, and from the bin
    /// of the quantile `slow` on.
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

/// The values below which these shares lie, ascending. `value` gets a bin and the position of the
/// quantile within its counts, 0 to 1.
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
impl Span {
    pub(super) fn bins(&self) -> usize {
        let lengths = [self.ttft.0.len(), self.e2el.0.len(), self.tpot.0.len(), self.itl.0.len(), self.ratio.0.len()];
        lengths.into_iter().max().unwrap_or(0)
    }
}
