//! The data of a backend that a policy sees: room, weight, load and observed pace.
//!
//! A candidate stays valid until the backend changes, however much time passes: work that decreases
//! with time is stored as the time when it ends. So the candidates of a pool lie side by side
//! (`room.rs`), and a choice copies none. Times are in seconds since admission began, work in
//! seconds of the engine.

use super::pace::SeenPace;
use crate::pool::adapters::AdapterPlace;
use crate::pool::capacity::Need;
use sluice_core::base::BackendId;

/// How many candidates most policies compare (`policy::compared`).
pub(in crate::pool) const COMPARED: usize = 6;
/// The share of a prefill that counts as left at the time at which the prefill should be over.
pub(in crate::pool) const OVERDUE: f64 = 0.3;
/// The time for which a small prompt counts as recent, seconds: about as long as a busy engine
/// takes to the first token. Not learned, because it must not grow where requests wait for
/// something else, such as an adapter.
const LATELY: f64 = 0.05;

/// A backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The backend.
    pub id: BackendId,
    /// Free sequences; 0 if the backend is out of rotation.
    pub free_slots: u32,
    /// Free tokens.
    pub free_tokens: u64,
    /// The longest prompt that the limit of prefill tokens admits now.
    pub free_prefill: u64,
    /// Share of new work relative to the others.
    pub weight: f64,
    /// Requests in flight.
    pub requests: u32,
    /// Sequences in flight.
    pub sequences: u32,
    /// Long prompts in prefill.
    pub long_prefills: u32,
    /// Outstanding prompt and output tokens.
    pub tokens: f64,
    /// Prefill work.
    pub backlog: Backlog,
    /// Prompt tokens of small prompts that wait for their first token.
    pub small_tokens: f64,
    /// How much longer small prompts wait while a large one is in prefill, on average, seconds.
    pub interference: f64,
    /// The share of predicted cached tokens that the engine had.
    pub trust: f64,
    /// Pace of decoding.
    pub decode: SeenPace,
    /// Pace of prefill.
    pub prefill: SeenPace,
    /// The number of the backend's last grant, over all backends: lower is less recently used.
    pub granted: u64,
}

impl Candidate {
    /// Whether there is room, apart from a permit for a long prompt.
    pub fn has_room(&self, need: &Need) -> bool {
        (need.slots <= self.free_slots)
            & (need.tokens() <= self.free_tokens)
            & (need.prompt_tokens <= self.free_prefill)
    }

    #[cfg(test)]
    pub(in crate::pool) fn idle(position: usize) -> Self {
        Self {
            id: BackendId::new(position),
            free_slots: u32::MAX,
            free_tokens: u64::MAX,
            free_prefill: u64::MAX,
            weight: 1.0,
            requests: 0,
            sequences: 0,
            long_prefills: 0,
            tokens: 0.0,
            backlog: Backlog::default(),
            small_tokens: 0.0,
            interference: 0.1,
            trust: 1.0,
            decode: SeenPace::default(),
            prefill: SeenPace::default(),
            granted: 0,
        }
    }
}

/// Prefill work, which decreases with time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backlog {
    /// When the prefills of large prompts are expected to be over.
    pub large_until: f64,
    /// Seconds of prefill of large prompts without a first token. At most this counts as left, and
    /// at least [`OVERDUE`] of it.
    pub large_waiting: f64,
    /// When the prefills of the small prompts that arrived a moment ago are over.
    pub small_until: f64,
    /// Seconds of prefill of the small prompts that came lately, as these count at the time `at`.
    pub lately: f64,
    /// When the backlog was noted.
    pub at: f64,
}

impl Backlog {
    /// Seconds until the prefills of large prompts are expected to be over.
    pub fn large(&self, now: f64) -> f64 {
        smaller(larger(self.large_until - now, OVERDUE * self.large_waiting), self.large_waiting)
    }

    /// Seconds until the prefills of small prompts that arrived a moment ago are over.
    pub fn small(&self, now: f64) -> f64 {
        larger(self.small_until - now, 0.0)
    }

    /// Seconds of prefill of small prompts that arrived within about the time to a first token,
    /// answered or not.
    pub fn lately(&self, now: f64) -> f64 {
        self.lately * larger(1.0 - larger(now - self.at, 0.0) * (1.0 / LATELY), 0.0)
    }
}

/// The larger of two numbers. `f64::max` also handles NaN, which takes five instructions instead of
/// one.
pub(super) fn larger(one: f64, other: f64) -> f64 {
    if one > other { one } else { other }
}

pub(super) fn smaller(one: f64, other: f64) -> f64 {
    if one < other { one } else { other }
}

/// A backend that could take a request.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'c> {
    /// The backend.
    pub candidate: &'c Candidate,
    /// Tokens of the request's prompt that are expected in the backend's prefix cache.
    pub cached: f64,
    /// Whether the request's adapter has a slot there.
    pub adapter: AdapterPlace,
}
