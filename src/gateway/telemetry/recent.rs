//! The last five minutes of one pool's home traffic: rates, tails and attainment for the live page,
//! `sluice status` and `sluice top`, and the last minute for the API.
//!
//! Requests are counted by home pool, whose promise the client sees. A long prompt that spilled to
//! the short pool says nothing about short prompts. Rates divide by the time that the slots cover.
//! That is the window or up to 5 s less, and less just after the start.
//!
//! Quantiles (TTFT of streams, TPOT of completed requests) come from bins that grow by 2^(1/8), so
//! they are right within 5 %. Attainment is the share of generating requests that met their
//! objectives; refused requests and clients that left do not count, because clients that cancel
//! would look like a slow engine.
//!
//! Bounds: about 95 KiB per pool. Time is a parameter.

use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::flow::{Outcome, Record};

/// Number of slots: five minutes.
const SLOTS: usize = 60;
const MINUTE_SLOTS: usize = 12;
const SLOT_SECONDS: u64 = 5;
/// Lower end of the first bin, seconds.
const BIN_FLOOR: f64 = 1e-4;
/// Bins per doubling.
const BINS_PER_OCTAVE: f64 = 8.0;
/// Bins from 0.1 ms to about 1,600 s; longer times are in the last bin.
pub(super) const BINS: usize = 192;

/// The numbers of a window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WindowStats {
    /// Requests that ended, per second.
    pub requests_per_second: f64,
    /// Requests that completed.
    pub completed: u64,
    /// Requests that were refused early for want of capacity.
    pub shed: u64,
    /// Requests that a backend's failure or a timeout ended.
    pub failed: u64,
    /// Clients that left.
    pub client_gone: u64,
    /// Requests that were refused through the client's fault.
    pub refused: u64,
    /// Requests that ran in another pool than their home.
    pub spilled: u64,
    /// Prompt tokens per second, as engines counted them, or estimated.
    pub prompt_tokens_per_second: f64,
    /// Output tokens per second, as engines counted them, or counted by events.
    pub generation_tokens_per_second: f64,
    /// Time to first token of streams.
    pub ttft_ms: Option<Quantiles>,
    /// Time per output token.
    pub tpot_ms: Option<Quantiles>,
    /// Share of the window's requests that met their objectives; absent if none has objectives.
    pub attainment: Option<f64>,
}

/// Two quantiles, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// Half are at or below this.
    pub p50: f64,
    /// 99 of 100 are at or below this.
    pub p99: f64,
    /// Number of values.
    pub count: u64,
}

#[derive(Debug)]
pub(super) struct Recent {
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    epoch: Instant,
    slots: Box<[Slot]>,
}

#[derive(Clone, Debug)]
struct Slot {
    /// The slot's number since the epoch. A slot that is used again is cleared.
    number: u64,
    counts: Counts,
    ttft: [u32; BINS],
    tpot: [u32; BINS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    completed: u64,
    shed: u64,
    failed: u64,
    client_gone: u64,
    refused: u64,
    spilled: u64,
    prompt: u64,
    generation: u64,
    /// Requests that were judged by objectives, and requests that met all.
    judged: u64,
    met: u64,
}

impl Recent {
    pub(super) fn new(now: Instant) -> Self {
        Self { window: Mutex::new(Window::new(now)) }
    }

    /// Begins anew, because the pool was not in service before.
    pub(super) fn restart(&self, now: Instant) {
        *self.window.lock() = Window::new(now);
    }

    pub(super) fn add(&self, record: &Record, now: Instant) {
        self.window.lock().slot(now).add(record);
    }

    pub(super) fn attainment(&self, now: Instant) -> Option<f64> {
        self.window.lock().attainment(now, SLOTS)
    }

    pub(super) fn minute(&self, now: Instant) -> WindowStats {
        self.window.lock().stats(now, MINUTE_SLOTS)
    }

    pub(super) fn five_minutes(&self, now: Instant) -> WindowStats {
        self.window.lock().stats(now, SLOTS)
    }
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { epoch: now, slots: (0..SLOTS as u64).map(Slot::empty).collect() }
    }

    fn number(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs() / SLOT_SECONDS
    }

    fn slot(&mut self, now: Instant) -> &mut Slot {
        let number = self.number(now);
        let slot = &mut self.slots[number as usize % SLOTS];
        if slot.number != number {
            *slot = Slot::empty(number);
        }
        slot
    }

    fn live(&self, now: Instant, slots: usize) -> impl Iterator<Item = &Slot> {
        let number = self.number(now);
        self.slots.iter().filter(move |slot| slot.number <= number && slot.number + slots as u64 > number)
    }

    fn attainment(&self, now: Instant, slots: usize) -> Option<f64> {
        let (met, judged) = self
            .live(now, slots)
            .fold((0, 0), |(met, judged), slot| (met + slot.counts.met, judged + slot.counts.judged));
        (judged > 0).then(|| met as f64 / judged as f64)
    }

    fn stats(&self, now: Instant, slots: usize) -> WindowStats {
        let number = self.number(now);
        let live = || self.live(now, slots);
        let sum = |read: fn(&Counts) -> u64| -> u64 { live().map(|slot| read(&slot.counts)).sum() };
        let age = now.saturating_duration_since(self.epoch).as_secs_f64();
        let in_slot = age - (number * SLOT_SECONDS) as f64;
        let covered = age.min(((slots as u64 - 1) * SLOT_SECONDS) as f64 + in_slot).max(1.0);
        let (completed, shed, failed) = (sum(|c| c.completed), sum(|c| c.shed), sum(|c| c.failed));
        let (client_gone, refused) = (sum(|c| c.client_gone), sum(|c| c.refused));
        WindowStats {
            requests_per_second: (completed + shed + failed + client_gone + refused) as f64 / covered,
            completed,
            shed,
            failed,
            client_gone,
            refused,
            spilled: sum(|c| c.spilled),
            prompt_tokens_per_second: sum(|c| c.prompt) as f64 / covered,
            generation_tokens_per_second: sum(|c| c.generation) as f64 / covered,
            ttft_ms: quantiles(live().map(|slot| &slot.ttft)),
            tpot_ms: quantiles(live().map(|slot| &slot.tpot)),
            attainment: self.attainment(now, slots),
        }
    }
}

impl Slot {
    fn empty(number: u64) -> Self {
        Self { number, counts: Counts::default(), ttft: [0; BINS], tpot: [0; BINS] }
    }

    fn add(&mut self, record: &Record) {
        let counts = &mut self.counts;
        match record.outcome {
            Outcome::Completed => counts.completed += 1,
            Outcome::ClientGone => counts.client_gone += 1,
            Outcome::Shed(_) => counts.shed += 1,
            Outcome::UpstreamError(_) | Outcome::Timeout(_) => counts.failed += 1,
            Outcome::Refused => counts.refused += 1,
        }
        if let Some(met) = record.slo_met {
            counts.judged += 1;
            counts.met += u64::from(met);
        }
        counts.spilled += u64::from(record.pool.is_some() && record.pool != record.home);
        let Some(stats) = &record.stats else { return };
        counts.prompt += record.prompt_tokens();
        counts.generation += record.generated_tokens();
        if let Some(ttft) = stats.ttft.filter(|_| record.stream) {
            self.ttft[bin(ttft)] += 1;
        }
        if let Some(tpot) = stats.tpot.filter(|_| record.outcome == Outcome::Completed) {
            self.tpot[bin(tpot)] += 1;
        }
    }
}

pub(super) fn bin(time: Duration) -> usize {
    let octaves = (time.as_secs_f64() / BIN_FLOOR).log2();
    // A time below the floor saturates to the first bin.
    ((octaves * BINS_PER_OCTAVE) as usize).min(BINS - 1)
}

/// The geometric middle of a bin, milliseconds.
pub(super) fn middle_ms(bin: usize) -> f64 {
    BIN_FLOOR * 1e3 * ((bin as f64 + 0.5) / BINS_PER_OCTAVE).exp2()
}

fn quantiles<'a>(rows: impl Iterator<Item = &'a [u32; BINS]>) -> Option<Quantiles> {
    let mut bins = [0u64; BINS];
    for row in rows {
        bins.iter_mut().zip(row).for_each(|(bin, count)| *bin += u64::from(*count));
    }
    let count: u64 = bins.iter().sum();
    if count == 0 {
        return None;
    }
    let quantile = |share: f64| {
        let rank = ((count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = bins.iter().position(|bin| {
            seen += bin;
            seen >= rank
        });
        middle_ms(found.unwrap_or(BINS - 1))
    };
    Some(Quantiles { p50: quantile(0.5), p99: quantile(0.99), count })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{completed, record};
    use super::*;
    use sluice_core::openai::{Route, ShedReason};

    fn add(recent: &Recent, record: &Record, has_objectives: bool, now: Instant) {
        let mut record = Record { has_objectives, ..record.clone() };
        record.judge();
        recent.add(&record, now);
    }

    #[test]
    fn quantiles_are_right_within_five_percent() {
        let now = Instant::now();
        let recent = Recent::new(now);
        for ms in 1..=1_000 {
            add(&recent, &completed(Duration::from_millis(ms), Duration::from_micros(5 * ms)), true, now);
        }
        let minute = recent.minute(now + Duration::from_secs(10));
        let ttft = minute.ttft_ms.unwrap();
        assert!((ttft.p50 / 500.0 - 1.0).abs() < 0.05, "{ttft:?}");
        assert!((ttft.p99 / 990.0 - 1.0).abs() < 0.05, "{ttft:?}");
        assert_eq!(ttft.count, 1_000);
        assert!((minute.requests_per_second - 100.0).abs() < 1e-9);
    }

    #[test]
    fn the_window_forgets_after_a_minute() {
        let now = Instant::now();
        let recent = Recent::new(now);
        add(&recent, &completed(Duration::from_millis(10), Duration::from_millis(5)), true, now);
        let at = |seconds| recent.minute(now + Duration::from_secs(seconds)).completed;
        assert_eq!((at(0), at(59), at(60), at(100_000)), (1, 1, 0, 0));
        add(
            &recent,
            &completed(Duration::from_millis(10), Duration::from_millis(5)),
            true,
            now + Duration::from_secs(60),
        );
        assert_eq!(at(61), 1);
    }

    #[test]
    fn every_number_of_a_window_is_of_that_window_and_cancelled_requests_are_not_judged() {
        let now = Instant::now();
        let recent = Recent::new(now);
        assert_eq!(recent.attainment(now), None);
        let judged = |outcome, met| Record { slo_met: Some(met), ..record(outcome) };
        add(&recent, &judged(Outcome::Completed, false), true, now);
        add(&recent, &judged(Outcome::ClientGone, false), true, now);
        add(&recent, &judged(Outcome::Refused, false), true, now);
        assert_eq!(recent.attainment(now), Some(0.0));
        let later = now + Duration::from_secs(240);
        add(&recent, &judged(Outcome::Completed, true), true, later);
        // A request without objectives cannot miss any.
        add(&recent, &record(Outcome::Shed(ShedReason::QueueFull)), false, later);
        let (five, one) = (recent.five_minutes(later), recent.minute(later));
        assert_eq!((five.attainment, five.completed, recent.attainment(later)), (Some(0.5), 2, Some(0.5)));
        assert_eq!((one.attainment, one.completed), (Some(1.0), 1));
        add(&recent, &record(Outcome::Shed(ShedReason::QueueFull)), true, later);
        assert_eq!(recent.minute(later).attainment, Some(0.5));
        assert_eq!(recent.five_minutes(later + Duration::from_secs(60)).attainment, Some(0.5), "the first is over");
        assert_eq!(recent.attainment(later + Duration::from_secs(300)), None);
    }

    #[test]
    fn attainment_counts_generating_requests_only() {
        let now = Instant::now();
        let recent = Recent::new(now);
        let of = |route, outcome, met| Record { route: Some(route), slo_met: met, ..record(outcome) };
        add(&recent, &of(Route::ChatCompletions, Outcome::Completed, Some(false)), true, now);
        for route in Route::ALL.into_iter().filter(|route| !route.generates()) {
            add(&recent, &of(route, Outcome::Completed, Some(true)), true, now);
            add(&recent, &of(route, Outcome::Shed(ShedReason::QueueFull), None), true, now);
        }
        assert_eq!(recent.attainment(now), Some(0.0));
    }

    #[test]
    fn extreme_times_have_a_bin() {
        assert_eq!(bin(Duration::ZERO), 0);
        assert_eq!(bin(Duration::MAX), BINS - 1);
    }
}
