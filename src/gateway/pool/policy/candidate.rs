//! What a policy sees of a backend: its weight, its load and its observed speed.
//!
//! A candidate is a copy; policies change nothing. The speed is a decayed mean of the TPOT of finished requests, clamped
//! so that a single odd sample counts little.

use std::time::Duration;

use sluice_core::base::BackendId;

/// Below this a TPOT is a measurement error (several tokens in one event).
const TPOT_MIN: Duration = Duration::from_micros(100);
/// Above this an engine is stuck rather than slow; health decides about it, not balance.
const TPOT_MAX: Duration = Duration::from_secs(2);
/// Weight of one new observation: about the last 20 requests count.
const WEIGHT: f64 = 0.1;

/// Observed decoding speed of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    seconds_per_token: Option<f64>,
}

impl Speed {
    /// Takes in the TPOT of one finished request.
    pub fn observe(&mut self, tpot: Duration) {
        let sample = tpot.clamp(TPOT_MIN, TPOT_MAX).as_secs_f64();
        self.seconds_per_token = Some(match self.seconds_per_token {
            None => sample,
            Some(mean) => mean + WEIGHT * (sample - mean),
        });
    }

    /// Seconds per output token; `None` before the first observation.
    pub fn seconds_per_token(&self) -> Option<f64> {
        self.seconds_per_token
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
