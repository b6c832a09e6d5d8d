//! Data-parallel ranks of one server: backends with separate capacity, load and prefixes that share
//! a process.
//!
//! The address names the rank. Drain, cordon, start and ejection concern the process, so they reach
//! all ranks of the server, in whichever pools these are. Each rank is probed; a rank that the
//! engine does not have is down alone. Bound: the ranks of a configuration.

use smallvec::SmallVec;

use super::health::{Phase, Verdict};
use super::state::{AdmissionState, Wakers};
use sluice_core::base::{BackendId, PoolId};

/// The backends of a server; most servers have one.
pub(super) type Ranks = SmallVec<[BackendId; 4]>;

impl AdmissionState {
    /// The backend and the other ranks of the same server.
    pub(super) fn ranks_of(&self, backend: BackendId) -> Ranks {
        let mut ranks = Ranks::from_slice(&[backend]);
        let Some(own) = self.backend(backend).filter(|own| own.address.rank.is_some()) else { return ranks };
        let others = self.backends.iter().enumerate().filter(|(index, _)| *index != backend.index());
        ranks.extend(others.filter_map(|(index, other)| {
            let is_rank = other.as_ref()?.address.is_same_server(&own.address);
            is_rank.then(|| BackendId::new(index))
        }));
        ranks
    }

    /// Whether both are ranks of one server.
    pub(super) fn share_a_server(&self, one: BackendId, other: BackendId) -> bool {
        let addresses = self.backend(one).zip(self.backend(other));
        addresses.is_some_and(|(one, other)| one.address.is_same_server(&other.address))
    }

    /// The members of a pool, with one rank for each server.
    pub(super) fn servers(&self, pool: PoolId) -> impl Iterator<Item = BackendId> + '_ {
        let members = self.members(pool);
        let is_first =
            |(at, id): &(usize, &BackendId)| !members[..*at].iter().any(|before| self.share_a_server(*before, **id));
        members.iter().enumerate().filter(move |entry| is_first(entry)).map(|(_, id)| *id)
    }

    /// The other ranks of a server leave rotation with the one that was ejected.
    pub(super) fn eject_ranks(&mut self, backend: BackendId, verdict: Verdict) {
        if !matches!(verdict, Verdict::Ejected(_)) {
            return;
        }
        for rank in self.ranks_of(backend).into_iter().skip(1) {
            let Some(health) = self.backend(backend).map(|found| found.health.clone()) else { return };
            if let Some(found) = self.backend_mut(rank) {
                found.health.follow(&health);
            }
        }
    }

    /// The probation of the other ranks ends with the one in which a request succeeded.
    pub(super) fn end_probation_of_ranks(&mut self, backend: BackendId, wakers: &mut Wakers) {
        for rank in self.ranks_of(backend).into_iter().skip(1) {
            if let Some(found) = self.backend_mut(rank)
                && found.health.phase() == Phase::Probation
            {
                found.health.end_probation();
                self.dispatch(rank, wakers);
            }
        }
    }
}
