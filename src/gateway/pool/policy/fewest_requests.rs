//! Fewest requests: the backend with the fewest in flight in relation to its weight, as nginx's `least_conn`.
//!
//! Knows nothing of what requests cost. Of equal ones the least recently used.

use super::candidate::{Candidate, Offer};
use sluice_core::base::BackendId;

pub(super) fn pick(offers: &[Offer<'_>]) -> Option<BackendId> {
    let candidates = offers.iter().map(|offer| offer.candidate);
    let least = candidates.min_by(|a, b| share(a).total_cmp(&share(b)).then(a.granted.cmp(&b.granted)));
    least.map(|candidate| candidate.id)
}

/// Requests in flight in relation to the weight.
pub(super) fn share(candidate: &Candidate) -> f64 {
    f64::from(candidate.requests) / candidate.weight
}
