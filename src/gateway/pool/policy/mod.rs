//! Which of several backends with room takes a request: a closed set, chosen per pool.
//!
//! A policy sees only backends that fit (admission has checked), and returns one of them. It is
//! a pure function of its arguments and a random generator. Work is measured against the configured weight:
//! a backend of weight 2 carries twice the work before it looks as busy.

mod pace;
mod candidate;
pub(super) mod cost;
mod least_work;
mod fewest_requests;
mod two_choices;

use super::capacity::Need;
use crate::config::Policy;
use sluice_core::base::{BackendId, Rng};

pub(super) use candidate::COMPARED;
pub use candidate::{Backlog, Candidate, Offer};
pub use pace::{Pace, SeenPace};

/// Up to this many backends that may have room, a choice compares all of them; with more, this many of a random walk
/// (`room.rs`). Turns are exact among more, since comparing them is an addition.
pub(super) fn compared(policy: Policy) -> usize {
    match policy {
        Policy::RoundRobin => 64,
        Policy::LeastWork | Policy::FewestRequests | Policy::TwoChoices | Policy::PrefixAffinity => COMPARED,
    }
}

/// Whether a policy predicts how much of a prompt an engine has in its prefix cache.
pub(super) fn predicts(policy: Policy) -> bool {
    matches!(policy, Policy::LeastWork | Policy::PrefixAffinity)
}

/// Picks one of `offers` (none when empty) at `now`, in seconds since admission began. Also returns the runner-up, where
/// that is worth comparing at the next choice. Round robin keeps its turn with the backends and is decided there;
/// `prefix_affinity` is an old name of `least_work`; the configuration warns about it.
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
        Policy::LeastWork | Policy::RoundRobin | Policy::PrefixAffinity => least_work::pick(offers, need, now),
    }
}
