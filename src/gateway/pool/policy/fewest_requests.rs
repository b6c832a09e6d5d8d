//! Fewest requests: the backend with the fewest requests in flight by weight, as nginx's
//! `least_conn`.
//!
//! It ignores the cost of requests. On a tie, the least recently used backend wins.

use super::candidate::{Candidate, Offer};
use sluice_core::base::BackendId;

pub(super) fn pick(offers: &[Offer<'_>]) -> Option<BackendId> {
    let candidates = offers.iter().map(|offer| offer.candidate);
    let least = candidates.min_by(|a, b| share(a).total_cmp(&share(b)).then(a.granted.cmp(&b.granted)));
    least.map(|candidate| candidate.id)
}

pub(super) fn share(candidate: &Candidate) -> f64 {
    f64::from(candidate.requests) / candidate.weight
}
