//! What a policy sees of a backend: its weight, its load and its observed pace.
//!
//! A candidate is a copy; policies change nothing. Times are in seconds of the engine's work.

use sluice_core::base::BackendId;

use super::pace::Pace;

/// A backend that could take the request now.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The backend.
    pub id: BackendId,
    /// Share of new work relative to the others.
    pub weight: f64,
    /// Requests in flight.
    pub requests: u32,
    /// Sequences in flight.
    pub sequences: u32,
    /// Outstanding prompt and output tokens.
    pub tokens: u64,
    /// Seconds until the prefills of large prompts that it has are expected to be over.
    pub backlog: f64,
    /// Seconds of prefill of small prompts that reached it a moment ago.
    pub recent: f64,
    /// Tokens of the request's prompt that it is expected to have in its prefix cache.
    pub cached: u64,
    /// Tokens of small prompts that wait for their first token.
    pub small_tokens: u64,
    /// How much longer small prompts wait for their first token while a large one is in prefill, on average, seconds.
    pub interference: f64,
    /// Pace of decoding.
    pub decode: Pace,
    /// Pace of prefill.
    pub prefill: Pace,
    /// The number of the last request that it was granted, counted over all backends: lower is less recently used.
    pub granted: u64,
}
