//! Cost and outcome of a pool's requests, for the [`Scaler`](crate::scaler::Scaler).
//!
//! The *work* of a request is its cost to an engine: the computed prompt tokens plus
//! [`OUTPUT_WORK`] for each output token. An engine's capacity is learned in the same unit, so the
//! factor matters only while the mix of lengths changes. In full batches an output token takes as
//! long as 3 to 8 prompt tokens (`sluice sim`: H200 4, A100 5, L4 7; an 8B model).

use std::time::Duration;

use super::loss::worst_ratio;
use sluice_core::meter::slo::Objectives;
use sluice_core::openai::ShedReason;
use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::{Outcome, Stage};

/// Work of an output token, in prompt tokens.
pub const OUTPUT_WORK: f64 = 5.0;
/// In a pool without objectives, a longer wait in the queue is a miss.
const WAITED: Duration = Duration::from_secs(1);
/// A request was near a bound from this share of it on.
const NEAR: f64 = 0.5;

/// Sums over ended requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Requests.
    pub ended: f64,
    /// Requests with known work, and the sum of their work.
    pub known: (f64, f64),
    /// Requests that say something about the load: not failed or refused.
    pub judged: f64,
    /// Judged requests that missed an objective or were shed.
    pub missed: f64,
    /// Judged requests that came near a bound, or missed it.
    pub near: f64,
}

impl Tally {
    /// Counts a request.
    pub fn add(&mut self, record: &Record, objectives: &Objectives) {
        if !record.generates() || record.copy.is_some() {
            return;
        }
        self.ended += 1.0;
        if record.outcome == Outcome::Completed {
            let cached = record.stats.as_ref().and_then(|stats| stats.usage.cached).unwrap_or(0);
            let prompt = record.prompt_tokens().saturating_sub(cached) as f64;
            self.known.0 += 1.0;
            self.known.1 += prompt + OUTPUT_WORK * record.generated_tokens() as f64;
        }
        let ratio = match record.outcome {
            Outcome::Completed if objectives.is_empty() => record.queue_wait.as_secs_f64() / WAITED.as_secs_f64(),
            Outcome::Completed => match record.stats.as_ref() {
                Some(stats) => worst_ratio(stats, record.prompt_tokens(), objectives),
                None => return,
            },
            Outcome::Shed(
                ShedReason::QueueFull | ShedReason::QueueTimeout | ShedReason::EngineStarting | ShedReason::NoBackend,
            )
            | Outcome::Timeout(Stage::FirstByte) => f64::INFINITY,
            _ => return,
        };
        self.judged += 1.0;
        self.missed += f64::from(u8::from(ratio > 1.0));
        self.near += f64::from(u8::from(ratio > NEAR));
    }

    /// All sums, in a fixed order.
    pub fn sums(&self) -> [f64; 6] {
        [self.ended, self.known.0, self.known.1, self.judged, self.missed, self.near]
    }

    /// The inverse of [`sums`](Self::sums).
    pub fn from_sums([ended, known, work, judged, missed, near]: [f64; 6]) -> Self {
        Self { ended, known: (known, work), judged, missed, near }
    }

    /// The increase since an earlier sum, at least 0.
    pub fn since(&self, before: &Self) -> Self {
        let (now, before) = (self.sums(), before.sums());
        Self::from_sums(std::array::from_fn(|at| (now[at] - before[at]).max(0.0)))
    }

    /// Adds another tally.
    pub fn merge(&mut self, other: &Self) {
        self.ended += other.ended;
        self.known = (self.known.0 + other.known.0, self.known.1 + other.known.1);
        self.judged += other.judged;
        self.missed += other.missed;
        self.near += other.near;
    }
}
