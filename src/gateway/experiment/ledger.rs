//! The measurements of each arm, in bounded memory.
//!
//! Requests are separated by class (`[[class]]`) and prompt length (*strata*), so that arms with
//! unequal mixes can be compared; and by the group of their unit (see [`unit`](super::unit)), so
//! that the spread between groups shows the amount of chance, including correlation within units.
//! For each quantity a group keeps a count and a sum of logarithms. The ratio of two geometric
//! means is the factor by which one arm is slower, and a heavy tail cannot dominate this ratio.
//!
//! Failures and missed objectives count by origin (`origins.rs`), so that no client alone decides
//! about an arm. Bound: about 21 KiB for each arm and stratum with requests, at most [`STRATA`].

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::counts::{Counts, UnitCells};
use super::quality::Quality;
use super::unit::{GROUPS, group_of};
use crate::origin::Origin;
use sluice_config::limits::MAX_CLASSES;
use sluice_core::openai::Answer;

/// Ends, in prompt tokens, of the ranges of lengths within a class; the last range has no end.
const LENGTHS: [u64; 4] = [512, 2_048, 8_192, 32_768];
const RANGES: usize = LENGTHS.len() + 1;
/// The most strata: the ranges of each class, and of requests in no class.
pub const STRATA: usize = RANGES * (MAX_CLASSES + 1);
const BIN: f64 = 1.05;
/// Smaller values count as this value: 10 us, or 0.01 tokens.
const SMALLEST: f64 = 1e-5;
/// Number of bins. They reach to 1,000 s, or a million tokens.
const BINS: usize = 378;

/// The stratum of a request, by the position of the class and the length of the prompt.
pub fn stratum(class: usize, tokens: u64) -> usize {
    class.min(MAX_CLASSES) * RANGES + LENGTHS.partition_point(|bound| *bound <= tokens)
}

/// A quantity that is measured for each request, in seconds unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Time to first token.
    Ttft,
    /// Time per output token.
    Tpot,
    /// End-to-end latency.
    E2el,
    /// Longest gap between events with output.
    Itl,
    /// Time in the queue of the gateway.
    Queue,
    /// TTFT, counted from when the request was sent upstream.
    BackendTtft,
    /// Time of prefill and decoding: backend TTFT and everything after the first token.
    Cost,
    /// Tokens generated, thousands.
    Tokens,
}

impl Quantity {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Ttft, Self::Tpot, Self::E2el, Self::Itl, Self::Queue, Self::BackendTtft, Self::Cost, Self::Tokens];
    /// The quantities that decide which arm is better.
    pub const JUDGED: [Self; 3] = [Self::Ttft, Self::Tpot, Self::E2el];

    /// The name.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ttft => "TTFT",
            Self::Tpot => "TPOT",
            Self::E2el => "E2EL",
            Self::Itl => "longest ITL",
            Self::Queue => "queue",
            Self::BackendTtft => "backend TTFT",
            Self::Cost => "engine time",
            Self::Tokens => "tokens out",
        }
    }
}

/// How a request ended, from the view of the arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The response was complete.
    Completed,
    /// The arm failed: an error, a timeout, no capacity, or a request that it could not serve.
    Failed,
    /// The client left, or the request was refused, which says nothing about the arm.
    Other,
}

/// One finished request.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// The client.
    pub origin: Origin,
    /// Whether a failure or a missed objective counts against the arm. It does not if the request
    /// was shed from pools that all arms share, or if too many failures or misses come from the
    /// origin (`origins.rs`).
    pub blamed: bool,
    /// The stratum; see [`stratum`].
    pub stratum: usize,
    /// Cell of the unit.
    pub cell: u16,
    /// The measured values, in the order of [`Quantity::ALL`].
    pub values: [Option<f64>; Quantity::ALL.len()],
    /// How the request ended.
    pub ending: Ending,
    /// Whether the request missed an objective; `None` without objectives.
    pub missed: Option<bool>,
    /// Whether the arm could not serve the request, so that it was served as without the
    /// experiment.
    pub fell_back: bool,
    /// Prompt tokens from the engine's prefix cache, and all prompt tokens, if the engine reports
    /// them.
    pub cached: Option<(u64, u64)>,
    /// How the answer of a complete response ended.
    pub answer: Answer,
}

impl Observation {
    /// Whether the arm is to blame for a failure.
    pub fn is_failure(&self) -> bool {
        self.blamed && (self.ending == Ending::Failed || self.fell_back)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Cell(pub(super) f64, pub(super) f64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sums {
    pub(super) cells: Vec<Cell>,
    /// Sum of squares of logarithms.
    pub(super) squares: f64,
    pub(super) total: Cell,
    bins: Vec<u32>,
}

impl Default for Sums {
    fn default() -> Self {
        Self { cells: vec![Cell::default(); GROUPS], squares: 0.0, total: Cell::default(), bins: vec![0; BINS] }
    }
}

impl Sums {
    fn add(&mut self, group: usize, value: f64) {
        let log = value.max(SMALLEST).ln();
        let cell = &mut self.cells[group];
        (cell.0, cell.1) = (cell.0 + 1.0, cell.1 + log);
        self.squares += log * log;
        self.total = Cell(self.total.0 + 1.0, self.total.1 + value);
        let bin = ((log - SMALLEST.ln()) / BIN.ln()) as usize;
        self.bins[bin.min(BINS - 1)] += 1;
    }
}

/// The sums of each stratum; a stratum without values has none.
///
/// Strata that earlier versions saved, one for each range of lengths, are read as the strata of the
/// first class. This is right, as is any division that does not depend on the arm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ByStratum(Vec<Option<Sums>>);

impl ByStratum {
    fn add(&mut self, stratum: usize, group: usize, value: f64) {
        let stratum = stratum.min(STRATA - 1);
        if self.0.len() <= stratum {
            self.0.resize(stratum + 1, None);
        }
        self.0[stratum].get_or_insert_default().add(group, value);
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (usize, &Sums)> {
        let with_values = |sums: &&Sums| sums.total.0 > 0.0;
        self.0.iter().enumerate().filter_map(move |(at, sums)| Some((at, sums.as_ref().filter(with_values)?)))
    }

    pub(super) fn count(&self) -> f64 {
        self.count_in(0..STRATA)
    }

    fn count_in(&self, strata: Range<usize>) -> f64 {
        self.all().filter(|(stratum, _)| strata.contains(stratum)).map(|(_, sums)| sums.total.0).sum()
    }

    /// The quantile `rank` (0 to 1), to the width of a bin.
    pub(super) fn value_at(&self, rank: f64) -> Option<f64> {
        let count = self.count();
        let wanted = rank.clamp(0.0, 1.0) * count;
        let mut below = 0.0;
        let bin = (0..BINS).find(|bin| {
            below += self.all().map(|(_, sums)| f64::from(sums.bins[*bin])).sum::<f64>();
            below > 0.0 && below >= wanted
        })?;
        Some(SMALLEST * BIN.powf(bin as f64 + 0.5))
    }
}

/// The measurements of one arm. `Counts` are by group of units.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmLedger {
    pub(super) quantities: [ByStratum; Quantity::ALL.len()],
    /// All assigned requests, counted at assignment.
    #[serde(default)]
    pub(super) assigned: Counts,
    pub(super) requests: Counts,
    /// Ended requests that count as served or failed.
    pub(super) ended: Counts,
    /// Ended requests that count as failed.
    pub(super) failed: Counts,
    #[serde(default)]
    pub(super) failed_units: UnitCells,
    /// Requests with objectives.
    pub(super) judged: Counts,
    pub(super) missed: Counts,
    pub(super) fell_back: f64,
    /// Prompts with a known cached part.
    #[serde(default)]
    pub(super) cached_prompts: f64,
    /// Cached tokens of these prompts, and all their tokens.
    #[serde(default)]
    cached: (f64, f64),
    #[serde(default)]
    pub(super) quality: Quality,
}

/// The measurements of all arms.
#[derive(Clone, Copy, Debug)]
pub struct Measured<'a> {
    /// Each arm; the first is the control.
    pub arms: &'a [ArmLedger],
    /// The control as it was when each arm was stopped, while other arms went on.
    pub controls: &'a [Option<ArmLedger>],
}

impl<'a> Measured<'a> {
    /// The control while an arm ran: both were measured at the same time.
    pub fn control_of(&self, arm: usize) -> &'a ArmLedger {
        self.controls.get(arm).and_then(Option::as_ref).unwrap_or(&self.arms[0])
    }
}

impl ArmLedger {
    pub(super) fn note_assigned(&mut self, cell: u16) {
        self.assigned.0[group_of(cell)] += 1.0;
    }

    /// Counts one finished request.
    pub fn add(&mut self, observation: &Observation) {
        let group = group_of(observation.cell);
        self.requests.0[group] += 1.0;
        let failed = observation.is_failure();
        if failed || (observation.ending == Ending::Completed && !observation.fell_back) {
            self.ended.0[group] += 1.0;
            self.failed.0[group] += f64::from(u8::from(failed));
        }
        if failed {
            self.failed_units.insert(observation.cell);
        }
        if observation.fell_back {
            self.fell_back += 1.0;
            return;
        }
        if let Some((cached, all)) = observation.cached {
            self.cached_prompts += 1.0;
            self.cached = (self.cached.0 + cached as f64, self.cached.1 + all as f64);
        }
        self.quality.add(group, observation.answer);
        if let Some(missed) = observation.missed.filter(|_| observation.blamed) {
            self.judged.0[group] += 1.0;
            self.missed.0[group] += f64::from(u8::from(missed));
        }
        for (quantity, value) in self.quantities.iter_mut().zip(observation.values) {
            if let Some(value) = value {
                quantity.add(observation.stratum, group, value);
            }
        }
    }

    /// How answers ended and were rated.
    pub fn quality(&self) -> &Quality {
        &self.quality
    }

    /// Requests that were assigned to the arm and have ended.
    pub fn requests(&self) -> u64 {
        self.requests.total() as u64
    }

    /// Requests that failed.
    pub fn failed(&self) -> u64 {
        self.failed.total() as u64
    }

    /// Requests that missed an objective, and requests that had one.
    pub fn missed(&self) -> (u64, u64) {
        (self.missed.total() as u64, self.judged.total() as u64)
    }

    /// Requests that the arm could not serve.
    pub fn fell_back(&self) -> u64 {
        self.fell_back as u64
    }

    /// The share of prompt tokens from the prefix cache, if an engine reports it.
    pub fn cached_share(&self) -> Option<f64> {
        let (cached, all) = self.cached;
        (all > 0.0).then(|| cached / all)
    }

    /// The mean of a quantity, if it has values.
    pub fn mean(&self, quantity: Quantity) -> Option<f64> {
        let sums = self.quantities[quantity as usize].all();
        let (count, sum) = sums.fold((0.0, 0.0), |(count, sum), (_, one)| (count + one.total.0, sum + one.total.1));
        (count > 0.0).then(|| sum / count)
    }

    /// Values of a quantity.
    pub fn count(&self, quantity: Quantity) -> u64 {
        self.quantities[quantity as usize].count() as u64
    }

    /// Values of a quantity in the class at this position.
    pub fn count_in_class(&self, quantity: Quantity, class: usize) -> u64 {
        self.quantities[quantity as usize].count_in(class * RANGES..(class + 1) * RANGES) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(stratum: usize) -> Observation {
        Observation {
            origin: Origin::default(),
            blamed: true,
            stratum,
            cell: 1,
            values: [Some(0.1); Quantity::ALL.len()],
            ending: Ending::Completed,
            missed: None,
            fell_back: false,
            cached: None,
            answer: Answer::default(),
        }
    }

    #[test]
    fn a_stratum_is_a_class_and_a_range_of_lengths_and_their_number_is_bounded() {
        assert_eq!([stratum(0, 511), stratum(0, 512), stratum(1, 40_000)], [0, 1, 9]);
        assert_eq!(stratum(usize::MAX, u64::MAX), STRATA - 1);
        let mut ledger = ArmLedger::default();
        for observation in [stratum(0, 10), stratum(0, 600), stratum(1, 6_000), usize::MAX].map(served) {
            ledger.add(&observation);
        }
        let in_class = |class| ledger.count_in_class(Quantity::E2el, class);
        assert_eq!([in_class(0), in_class(1), in_class(2), in_class(MAX_CLASSES)], [2, 1, 0, 1]);
        assert_eq!(ledger.count(Quantity::E2el), 4);
    }

    #[test]
    fn ledgers_that_an_earlier_version_saved_are_read_and_go_on() {
        let mut saved = serde_json::to_value(ArmLedger::default()).unwrap();
        let ranges: Vec<Sums> = (0..5)
            .map(|range| {
                let mut sums = Sums::default();
                (0..range).for_each(|_| sums.add(1, 0.1));
                sums
            })
            .collect();
        saved["quantities"][Quantity::E2el as usize] = serde_json::to_value(&ranges).unwrap();
        let mut ledger: ArmLedger = serde_json::from_value(saved).unwrap();
        assert_eq!((ledger.count(Quantity::E2el), ledger.mean(Quantity::E2el)), (10, Some(0.1)));
        ledger.add(&served(stratum(1, 6_000)));
        assert_eq!([0, 1].map(|class| ledger.count_in_class(Quantity::E2el, class)), [10, 1]);
        let again: ArmLedger = serde_json::from_value(serde_json::to_value(&ledger).unwrap()).unwrap();
        assert_eq!(again, ledger);
    }
}
