//! The types of a search: the load of a trial, the rule for the verdict, and the result.
//!
//! A *trial* is one run of the load generator at one load. Bounds: [`SearchGoal::max_trials`].

use serde::{Deserialize, Serialize};
use sluice_core::stats::{Estimate, mean};

/// Smallest share of the due requests that must be sent, so that a verdict counts.
pub const DELIVERED: f64 = 0.97;

/// The goal of a search, and how thorough it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchGoal {
    /// The share of requests that must meet their objectives, in (0, 1).
    pub attainment: f64,
    /// Amount by which the long-run attainment may be below the target.
    pub slack: f64,
    /// The longest bound of an objective, seconds. Trials last a multiple of it, so that queues can
    /// grow.
    pub longest_bound: f64,
    /// The relative half-width of the 90 % interval at which the rate counts as known.
    pub tolerance: f64,
    /// The fewest requests of a look; samples and proofs have three times as many.
    pub requests: usize,
    /// The most trials.
    pub max_trials: usize,
    /// The search ends early once it is clear that the highest rate, or [`SearchResult::most`], is
    /// not above this rate. To compare two systems, set it to the other system's `most` or less.
    pub floor: Option<f64>,
    /// Whether to prove the rate, not only to estimate the boundary.
    pub prove: bool,
    /// Seed of the loads.
    pub seed: u64,
}

impl SearchGoal {
    /// Shortest look, in multiples of the longest bound; samples and proofs last three times that.
    pub const SPANS: f64 = 20.0;
    /// The warm-up of a trial, in multiples of the longest bound.
    const WARMUP_SPANS: f64 = 4.0;

    /// A goal of 99 % attainment with default thoroughness and no bound above `longest_bound`
    /// seconds.
    pub fn new(longest_bound: f64) -> Self {
        Self {
            attainment: 0.99,
            slack: 0.01,
            longest_bound,
            tolerance: 0.035,
            requests: 1500,
            max_trials: 40,
            floor: None,
            prove: true,
            seed: 0,
        }
    }

    pub(super) fn rule(&self, rate: f64, kind: TrialKind) -> TrialRule {
        let requests_in = |spans: f64| (spans * self.longest_bound * rate).ceil().max(0.0) as usize;
        let times = if kind == TrialKind::Look { 1 } else { 3 };
        let length = times * self.requests.max(requests_in(Self::SPANS)).max(1);
        TrialRule { kind, target: self.attainment, warmup: requests_in(Self::WARMUP_SPANS), length }
    }
}

/// The load of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialLoad {
    /// One request after the other.
    Stream,
    /// A closed loop with this many requests in flight.
    Saturated(usize),
    /// An open loop at this many requests per second, with the workload's arrival process.
    Rate(f64),
}

/// The thoroughness of a trial at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialKind {
    /// Ends as soon as there is a verdict. At full length, the share of hits decides.
    Look,
    /// Counts misses at full length.
    Sample,
    /// Runs at full length, and fails if latencies keep growing.
    Proof,
}

/// The verdict of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialVerdict {
    /// The objectives hold at this rate.
    Holds,
    /// The objectives do not hold.
    Fails,
}

/// The rule for the verdict of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialRule {
    /// The kind of trial.
    pub kind: TrialKind,
    /// The share of requests that must meet their objectives.
    pub target: f64,
    /// Number of requests at the start that do not count, because they meet an empty server.
    pub warmup: usize,
    /// Requests that count, at least 1.
    pub length: usize,
}

/// One trial to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// The load.
    pub load: TrialLoad,
    /// The most requests to send.
    pub requests: usize,
    /// Number of first completions that do not count for the throughput.
    pub warmup: usize,
    /// Seed of arrivals and prompts.
    pub seed: u64,
}

/// Measurements apart from single requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialStats {
    /// Requests completed per second ([`throughput`]), without the warm-up.
    pub throughput: Estimate,
    /// Sent requests divided by due requests; below 1 if the client was too slow.
    pub delivered: f64,
    /// Duration, seconds.
    pub seconds: f64,
}

/// A finished trial.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialReport {
    /// The load.
    pub load: TrialLoad,
    /// The thoroughness.
    pub kind: TrialKind,
    /// The verdict.
    pub verdict: TrialVerdict,
    /// Requests that counted.
    pub requests: usize,
    /// The group of requests with the lowest attainment.
    pub group: usize,
    /// The share of that group's requests that met their objectives.
    pub attainment: Estimate,
    /// Throughput, delivery and duration.
    pub stats: TrialStats,
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchEnd {
    /// The rate is known within the tolerance, and proven if requested.
    Found,
    /// Single requests do not meet the objectives often enough, or no rate held.
    NoRate,
    /// The highest rate, or [`SearchResult::most`], is not above [`SearchGoal::floor`].
    BelowFloor,
    /// The client could not send fast enough; the server may sustain a higher rate.
    ClientLimit,
    /// All trials were used; a rate above [`SearchResult::best`] may hold, too.
    TrialLimit,
}

/// A rate at which a proof held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProvenRate {
    /// Requests per second.
    pub rate: f64,
    /// Attainment of the proof.
    pub attainment: Estimate,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// The highest proven rate, if a proof was requested and held.
    pub best: Option<ProvenRate>,
    /// The highest rate as estimated from all trials, with a 90 % interval.
    pub boundary: Option<Estimate>,
    /// The limit on reported rates: a share of the saturated throughput; infinite if not measured.
    pub most: f64,
    /// The rate to prove next: the boundary with safety margins.
    pub safe: Option<f64>,
    /// Why the search ended.
    pub ending: SearchEnd,
    /// All trials, in order.
    pub trials: Vec<TrialReport>,
}

/// Completions per second, with a 90 % interval. `ended`: the times of completions in seconds,
/// ascending; the first `warmup` do not count. 0 if there are too few.
pub fn throughput(ended: &[f64], warmup: usize) -> Estimate {
    let counted = ended.get(warmup.saturating_sub(1)..).unwrap_or_default();
    let gaps: Vec<f64> = counted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let gap = mean::of_series(&gaps, 0.9);
    let rate = |gap: f64| if gap > 0.0 { gap.recip() } else { f64::INFINITY };
    if gaps.is_empty() || gap.value <= 0.0 {
        return Estimate { value: 0.0, low: 0.0, high: f64::INFINITY };
    }
    Estimate { value: rate(gap.value), low: rate(gap.high), high: rate(gap.low) }
}
