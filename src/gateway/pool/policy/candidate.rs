//! What a policy sees of a backend: its weight, its load and its observed speed.
//!
//! A candidate is a copy; policies change nothing. The speed is a decayed mean of the TPOT of finished requests, clamped
//! so that a single odd sample counts little. It ages: a backend that was slow once gets no requests, so nothing would
//! correct its speed. Without new observations it counts as less and less slower than the fastest ([`HALF_LIFE`]), and
//! as unmeasured after [`FORGOTTEN`]: then it gets a request and is measured again, at the cost of that one request.

use std::time::Duration;

use sluice_core::base::BackendId;
use tokio::time::Instant;

/// Below this a TPOT is a measurement error (several tokens in one event).
const TPOT_MIN: Duration = Duration::from_micros(100);
/// Above this an engine is stuck rather than slow; health decides about it, not balance.
const TPOT_MAX: Duration = Duration::from_secs(2);
/// Weight of one new observation: about the last 20 requests count.
const WEIGHT: f64 = 0.1;

/// The time after which a backend that is not observed counts as half as much slower than the fastest.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// The time after which a backend that is not observed counts as unmeasured.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// Observed decoding speed of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    mean: Option<Mean>,
}

/// Seconds per output token, and when they were last observed.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mean {
    seconds: f64,
    observed: Instant,
}

impl Speed {
    /// Takes in the TPOT of one finished request.
    pub fn observe(&mut self, tpot: Duration, now: Instant) {
        let sample = tpot.clamp(TPOT_MIN, TPOT_MAX).as_secs_f64();
        // After a pause the old mean says little.
        let seconds = match self.mean {
            Some(mean) if now.saturating_duration_since(mean.observed) < FORGOTTEN => {
                mean.seconds + WEIGHT * (sample - mean.seconds)
            }
            _ => sample,
        };
        self.mean = Some(Mean { seconds, observed: now });
    }

    /// Seconds per output token; `None` before the first observation.
    pub fn seconds_per_token(&self) -> Option<f64> {
        self.mean.map(|mean| mean.seconds)
    }

    /// What counts now, where `fastest` are the seconds per token of the fastest backend, and a backend is at most
    /// `spread_max` times slower.
    pub(super) fn pace(&self, fastest: f64, spread_max: f64, now: Instant) -> f64 {
        let Some(mean) = self.mean else { return fastest };
        let age = now.saturating_duration_since(mean.observed);
        if age >= FORGOTTEN {
            return fastest;
        }
        let slower = mean.seconds.min(fastest * spread_max) - fastest;
        fastest + slower * 0.5_f64.powf(age.div_duration_f64(HALF_LIFE))
    }
}

/// A backend that could take the request now.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The backend.
    pub id: BackendId,
    /// Share of new work relative to the others.
    pub weight: f64,
    /// Outstanding tokens.
    pub tokens: u64,
    /// Requests in flight.
    pub requests: u32,
    /// Observed speed of decoding.
    pub speed: Speed,
}
