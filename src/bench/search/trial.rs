//! The types of a search: what a trial sends, how it is judged, and what a search returns.
//!
//! A *trial* is one run of the load generator at one load. A search is a sequence of trials. Every trial at a rate has a
//! [`TrialKind`], which says how many requests it may take before it must decide. Bounds: [`SearchGoal::max_trials`].

use sluice_core::stats::{Estimate, mean};

/// The share of the due requests that a trial must have sent. Below it the client is too slow for a verdict.
pub const DELIVERED: f64 = 0.97;

/// The objective of a search, and how thorough it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchGoal {
    /// The share of requests that must meet their objectives, in (0, 1).
    pub attainment: f64,
    /// The long-run attainment at the reported rate may be below the target by at most this much.
    pub slack: f64,
    /// The longest bound of an objective, seconds. Trials last a multiple of it, so that queues have time to grow.
    pub longest_bound: f64,
    /// Samples are taken until the rate is known to this share either way (90 %).
    pub tolerance: f64,
    /// The least number of requests of a look. A sample and a proof have three times as many.
    pub requests: usize,
    /// The most trials.
    pub max_trials: usize,
    /// Gives up early, after two trials or three, on a system whose highest rate, or [`SearchResult::most`], is not above this
    /// one. To compare systems, it is the highest rate of another, but not more than that one's `most`.
    pub floor: Option<f64>,
    /// Whether the rate is proven in the end. Without a proof the search returns the boundary alone.
    pub prove: bool,
    /// Seed of the loads.
    pub seed: u64,
}

impl SearchGoal {
    /// A look lasts at least this many times the longest bound; a sample and a proof three times that.
    pub const SPANS: f64 = 20.0;
    /// The warm-up of a trial, in multiples of the longest bound.
    const WARMUP_SPANS: f64 = 4.0;

    /// 99 % attainment with the default thoroughness, for objectives of at most `longest_bound` seconds.
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

    /// How a trial at `rate` is judged.
    pub(super) fn rule(&self, rate: f64, kind: TrialKind) -> TrialRule {
        let requests_in = |spans: f64| (spans * self.longest_bound * rate).ceil().max(0.0) as usize;
        let times = if kind == TrialKind::Look { 1 } else { 3 };
        let length = times * self.requests.max(requests_in(Self::SPANS)).max(1);
        TrialRule { kind, target: self.attainment, warmup: requests_in(Self::WARMUP_SPANS), length }
    }
}

/// What a trial sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TrialLoad {
    /// One request after the other.
    Stream,
    /// A closed loop with this many requests in flight.
    Saturated(usize),
    /// An open loop at this many requests per second, with the arrival process of the workload.
    Rate(f64),
}

/// How thorough a trial at a rate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialKind {
    /// Ends as soon as it can decide.
    Look,
    /// Runs its length to count misses.
    Sample,
    /// Runs its length, and fails if latencies keep growing.
    Proof,
}

/// The verdict of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrialVerdict {
    /// The objectives hold at this rate.
    Holds,
    /// The objectives do not hold.
    Fails,
}

/// How one trial is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialRule {
    /// The kind of trial.
    pub kind: TrialKind,
    /// The share of requests that must meet their objectives.
    pub target: f64,
    /// Requests at the start that do not count.
    pub warmup: usize,
    /// Requests that count, at least 1.
    pub length: usize,
}

/// One trial to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// What to send.
    pub load: TrialLoad,
    /// The most requests to send.
    pub requests: usize,
    /// How many of the first completions do not count for the throughput.
    pub warmup: usize,
    /// Seed of arrivals and prompts.
    pub seed: u64,
}

/// What a trial measured besides its requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialStats {
    /// Requests completed per second ([`throughput`]), without the warm-up.
    pub throughput: Estimate,
    /// Sent requests over due requests; 1 unless the client was too slow.
    pub delivered: f64,
    /// Duration, seconds.
    pub seconds: f64,
}

/// A finished trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialReport {
    /// What was sent.
    pub load: TrialLoad,
    /// How thoroughly it was judged.
    pub kind: TrialKind,
    /// The verdict.
    pub verdict: TrialVerdict,
    /// Requests that counted.
    pub requests: usize,
    /// The group of requests with the lowest attainment.
    pub group: usize,
    /// The share of its requests that met their objectives.
    pub attainment: Estimate,
    /// Throughput, delivery and duration.
    pub stats: TrialStats,
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchEnd {
    /// The rate is known within the tolerance, and proven.
    Found,
    /// Even a request alone does not meet the objectives often enough.
    NoRate,
    /// The highest rate, or [`SearchResult::most`], is not above [`SearchGoal::floor`].
    BelowFloor,
    /// The client could not send as fast as requested. The server may sustain a higher rate.
    ClientLimit,
    /// The limit on trials was reached. The reported rate is proven, but a higher one may hold too.
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
    /// The highest proven rate. `None` when no proof held.
    pub best: Option<ProvenRate>,
    /// The highest rate as estimated from all trials together (90 %).
    pub boundary: Option<Estimate>,
    /// No rate above this one is reported: a share of the saturated throughput. Infinite if that was not measured.
    pub most: f64,
    /// The rate that the search would prove next: the boundary with its safety margins.
    pub safe: Option<f64>,
    /// Why the search ended.
    pub ending: SearchEnd,
    /// All trials, in order.
    pub trials: Vec<TrialReport>,
}

/// Completions per second and their long-run interval (90 %), from the times (seconds, ascending) at which requests ended. The
/// first `warmup` do not count. 0 when there are too few.
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
