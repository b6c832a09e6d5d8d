//! Fewest requests: the backend with the fewest in flight in relation to its weight, as nginx's `least_conn`.
//!
//! Knows nothing of what requests cost. Of equal ones the least recently used.

use super::candidate::Candidate;
use sluice_core::base::BackendId;

pub(super) fn pick(candidates: &[Candidate]) -> Option<BackendId> {
    let share = |candidate: &Candidate| f64::from(candidate.requests) / candidate.weight;
    let least = candidates.iter().min_by(|a, b| share(a).total_cmp(&share(b)).then(a.granted.cmp(&b.granted)));
    least.map(|candidate| candidate.id)
}
