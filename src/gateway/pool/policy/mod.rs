//! Policies: which of several backends with room takes a request. A closed set, configured per
//! pool.
//!
//! A policy is a pure function of backends with room and a random generator. Work counts relative
//! to weight: a backend of weight 2 carries twice the work before it looks as busy.

mod pace;
mod candidate;
pub(super) mod cost;
mod least_work;
mod fewest_requests;
mod two_choices;

use super::capacity::Need;
use sluice_config::Policy;
use sluice_core::base::{BackendId, Rng};

pub(super) use candidate::COMPARED;
pub use candidate::{Backlog, Candidate, Offer};
pub use pace::{Pace, SeenPace};

/// If at most this many backends may have room, a choice compares all of them. Otherwise it
/// compares this many of a random walk (`room.rs`). Round robin compares more, because a comparison
/// is one addition.
pub(super) fn compared(policy: Policy) -> usize {
    match policy {
        Policy::RoundRobin => 64,
        Policy::LeastWork | Policy::FewestRequests | Policy::TwoChoices => COMPARED,
    }
}

/// Whether a policy predicts how much of a prompt is in an engine's prefix cache.
pub(super) fn predicts(policy: Policy) -> bool {
    policy == Policy::LeastWork
}

/// Picks one of `offers` (none if empty) at `now`, in seconds since admission began. Also returns
/// the runner-up, if it should be compared at the next choice. Round robin is decided in
/// `choice.rs`.
pub fn pick(
    policy: Policy,
    offers: &[Offer<'_>],
    need: &Need,
    now: f64,
    rng: &mut Rng,
) -> (Option<BackendId>, Option<BackendId>) {
    match policy {
        Policy::TwoChoices => (two_choices::pick(offers, rng), None),
        Policy::FewestRequests => (fewest_requests::pick(offers), None),
        Policy::LeastWork | Policy::RoundRobin => least_work::pick(offers, need, now),
    }
}
