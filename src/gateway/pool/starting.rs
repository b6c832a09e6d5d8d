//! Requests that only a starting engine could serve: whether and how long they wait, and how they
//! are refused.
//!
//! They wait in the pool's queue, because most starts that a request meets are nearly over. If no
//! engine is expected to be ready before the deadline, a request is refused at once, so that the
//! client can go elsewhere. In both cases the reason is `engine_starting`, and `Retry-After` says
//! when the first engine is expected. `fleet`, which runs the engines, sets that time; there is
//! no clock here.
//!
//! A pool that may have no engine (`PoolRules::hold`) holds requests: while no backend is in
//! rotation, they wait minutes for the first one. Waiting requests cause the start. They are shed
//! when the start fails and no other engine is coming. A request that another backend has failed,
//! or that only one backend can serve, is not held.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::backend::BackendState;
use super::grant::WaitResult;
use super::queue::WaiterId;
use super::request::AdmissionRequest;
use super::service::Cordon;
use super::state::{AdmissionState, Waiter, Wakers};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

/// No engine that requests depend on is in rotation, and some start or are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EnginesStarting {
    /// When the first engine is expected to be ready; `None`: for one of them, the time is not
    /// known.
    pub(super) ready_at: Option<Instant>,
    /// How long a start takes if none has begun; `None`: not known.
    pub(super) takes: Option<Duration>,
}

impl AdmissionState {
    /// `None` if a backend of these pools is in rotation, or none is starting or stopped for lack
    /// of demand.
    pub(super) fn engines_starting(&self, pools: &[PoolId]) -> Option<EnginesStarting> {
        let (mut starting, mut idle) = (None, None);
        for id in pools.iter().flat_map(|pool| self.members(*pool)) {
            let Some(backend) = self.backend(*id).filter(|backend| backend.service.is_wanted()) else {
                continue;
            };
            if backend.in_rotation() {
                return None;
            }
            // An engine that drains is about to start: when it will be ready is not known yet.
            let ready_at = match backend.service.cordon() {
                Cordon::Starting => backend.service.ready_at,
                Cordon::Draining => None,
                // A stopped engine counts only if no engine is starting.
                Cordon::Idle => {
                    let takes = backend.service.start_takes;
                    idle = Some(EnginesStarting { ready_at: None, takes });
                    continue;
                }
                Cordon::Open | Cordon::Down => continue,
            };
            starting = Some(match starting {
                None => EnginesStarting { ready_at, takes: None },
                Some(EnginesStarting { ready_at: first, .. }) => EnginesStarting {
                    takes: None,
                    ready_at: first.zip(ready_at).map(|(one, other): (Instant, Instant)| one.min(other)),
                },
            });
        }
        starting.or(idle)
    }

    /// Whether no engine of these pools will be ready by `deadline`, as far as known.
    pub(super) fn starts_too_late(&self, pools: &[PoolId], deadline: Instant) -> bool {
        let starting = self.engines_starting(pools);
        starting.and_then(|starting| starting.ready_at).is_some_and(|ready_at| ready_at > deadline)
    }

    /// Until when a request that enters now is held for a first engine; `None`: it is not held.
    pub(super) fn held_until(&self, request: &AdmissionRequest, pools: &[PoolId]) -> Option<Instant> {
        let hold = self.pools.get(request.home.index())?.rules.hold?;
        let is_plain = request.avoid.is_empty() && request.only.is_none();
        (is_plain && self.may_get_an_engine(pools)).then(|| request.arrived + hold)
    }

    pub(super) fn holds(&self, pool: PoolId) -> bool {
        self.pools.get(pool.index()).is_some_and(|found| found.rules.hold.is_some()) && self.may_get_an_engine(&[pool])
    }

    /// Whether no backend of these pools is in rotation, but one may come. That includes pools
    /// without backends, because a pool of pods has none while it has no pod.
    fn may_get_an_engine(&self, pools: &[PoolId]) -> bool {
        let members = || pools.iter().flat_map(|pool| self.members(*pool)).filter_map(|id| self.backend(*id));
        let comes = |backend: &BackendState| backend.service.is_wanted() && backend.service.cordon() != Cordon::Down;
        !members().any(BackendState::in_rotation) && (members().next().is_none() || members().any(comes))
    }

    /// The engine of a backend failed to start: sheds the requests that the backend's pool holds,
    /// unless another engine is coming.
    pub(super) fn start_failed(&mut self, backend: BackendId, wakers: &mut Wakers) {
        let Some(pool) = self.backend(backend).map(|found| found.pool) else { return };
        let comes = |id: &BackendId| {
            let is_other = *id != backend && !self.share_a_server(*id, backend);
            let service = self.backend(*id).filter(|_| is_other).map(|other| &other.service);
            service.is_some_and(|it| it.is_wanted() && !matches!(it.cordon(), Cordon::Down | Cordon::Idle))
        };
        if self.pools[pool.index()].rules.hold.is_none() || self.members(pool).iter().any(comes) {
            return;
        }
        let reason = match self.engines_starting(&[pool]) {
            Some(_) => ShedReason::EngineStarting,
            None => ShedReason::NoBackend,
        };
        let ids: Vec<WaiterId> = self.pools[pool.index()].queue.ids().collect();
        for id in ids {
            let depends = |waiter: &&Waiter| {
                let mut members = waiter.request.pools().flat_map(|pool| self.members(pool).to_vec());
                !members.any(|id| self.backend(id).is_some_and(BackendState::in_rotation))
            };
            if self.waiters[id as usize].as_ref().is_some_and(|waiter| depends(&waiter)) {
                self.end_wait(id, WaitResult::Shed(reason), wakers);
            }
        }
    }

    /// Sheds the pinned requests that no backend in rotation can serve any more, because they would
    /// wait minutes for an engine to drain and start again. Called when a backend of this pool
    /// leaves the rotation, serves less, or is no longer configured. If any request is pinned,
    /// looks at each waiter of the pools that use the backend.
    pub(super) fn shed_pinned(&mut self, pool: PoolId, wakers: &mut Wakers) {
        if self.pinned == 0 {
            return;
        }
        let queues = std::iter::once(&pool).chain(&self.pools[pool.index()].fed_by);
        let waiting = queues.flat_map(|pool| self.pools[pool.index()].queue.ids());
        let left_alone = |id: &WaiterId| {
            let waiter = self.waiters[*id as usize].as_ref();
            waiter.is_some_and(|waiter| waiter.request.pinned && !self.is_any_for(&waiter.request))
        };
        let ids: SmallVec<[WaiterId; 4]> = waiting.filter(left_alone).collect();
        for id in ids {
            self.end_wait(id, WaitResult::Shed(ShedReason::NoBackend), wakers);
        }
    }

    /// Whether a backend that may serve the request is in rotation.
    pub(super) fn is_any_for(&self, request: &AdmissionRequest) -> bool {
        let mut members = request.pools().flat_map(|pool| self.members(pool));
        members.any(|id| self.allows(request, *id) && self.backend(*id).is_some_and(BackendState::in_rotation))
    }
}
