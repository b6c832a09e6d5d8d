//! The lock around the admission state, shared by [`super::Admission`] and every lease and ticket.
//!
//! Each method is one critical section. Wakers that it collects run after the lock is released, so
//! that a woken task never waits for the lock of the task that woke it.

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::backend::BackendState;
use super::capacity::Allocation;
use super::engine_load::DecodeStart;
use super::engine_work::Bell;
use super::fault_report::FaultReport;
use super::grant::Grant;
use super::health::{BackendFault, RefusedGateway};
use super::state::{AdmissionState, Wakers};
use crate::origin::Origin;
use sluice_core::base::BackendId;

#[derive(Debug)]
pub(super) struct SharedState {
    state: Mutex<AdmissionState>,
    bell: Bell,
}

impl SharedState {
    pub(super) fn new(state: AdmissionState) -> Self {
        Self { state: Mutex::new(state), bell: Bell::default() }
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock()
    }

    /// Runs `change` under the lock, and after that the wakers that `change` has collected.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut AdmissionState, &mut Wakers) -> T) -> T {
        let mut wakers = Wakers::new();
        let mut state = self.state.lock();
        state.end_shares();
        let result = change(&mut state, &mut wakers);
        drop(state);
        for waker in wakers {
            waker.wake();
        }
        result
    }

    /// Changes a backend, if it is known, in a way that gives no waiter room.
    pub(super) fn change<T>(&self, backend: BackendId, change: impl FnOnce(&mut BackendState) -> T) -> Option<T> {
        self.state.lock().backend_mut(backend).map(change)
    }

    /// `seen`: the first token of a stream was seen, so the engine surely has the request.
    pub(super) fn end_prefill(
        &self,
        backend: BackendId,
        allocation: &mut Allocation,
        seen: bool,
    ) -> Option<DecodeStart> {
        if *allocation == Allocation::default() {
            return None;
        }
        self.update(|state, wakers| {
            state.end_charged_prefill(backend, allocation);
            let found = state.backend_mut(backend)?;
            if seen && allocation.is_prefilling() {
                allocation.seen = Some(found.settled.begin());
            }
            let start = found.end_prefill(allocation);
            state.dispatch(backend, wakers);
            state.serve_home_of(allocation.bill, wakers);
            Some(start)
        })
    }

    pub(super) fn observe_cached(&self, grant: &Grant, prompt_tokens: u64, cached: Option<u64>) {
        let mut state = self.state.lock();
        state.report_served(grant, prompt_tokens, cached);
        let expected = grant.allocation.cached_tokens();
        let had = state.backend_mut(grant.backend).and_then(|found| found.cache.observe(expected, cached));
        if let Some(had) = had
            && let Some(pool) = state.pools.get_mut(grant.pool.index())
        {
            let share = had as f64 / prompt_tokens.max(1) as f64;
            pool.prefixes.forget(&grant.prefix, grant.backend, (share * grant.prefix.bytes as f64) as u32);
        }
    }

    pub(super) fn success(&self, backend: BackendId, origin: Origin, now: Instant) {
        self.update(|state, wakers| {
            let Some(found) = state.backend_mut(backend) else { return };
            let before = found.health.allowance();
            found.health.success(origin, now);
            if before != found.health.allowance() {
                state.dispatch(backend, wakers);
                state.end_probation_of_ranks(backend, wakers);
            }
        });
    }

    pub(super) fn refused_gateway(
        &self,
        backend: BackendId,
        refused: RefusedGateway,
        origin: Origin,
        now: Instant,
    ) -> bool {
        self.update(|state, wakers| {
            let is_new = state.refused_gateway(backend, refused, origin, now);
            state.dispatch(backend, wakers);
            is_new
        })
    }

    pub(super) fn failure(&self, backend: BackendId, fault: BackendFault, origin: Origin, now: Instant) -> FaultReport {
        self.update(|state, wakers| {
            let report = state.failure(backend, fault, origin, now);
            state.dispatch(backend, wakers);
            report
        })
    }
}
