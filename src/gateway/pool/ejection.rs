//! Which failures eject a backend, by comparison with the rest of its pool.
//!
//! `health.rs` counts the failures of one backend; here they are compared with the outcomes of
//! other clients and with the other backends of the pool. The failures of a client are its own if
//! the backend serves other clients (`recent_origins.rs`). They are also its own if only this
//! client was here lately, fails on another backend of the pool as well, and other clients are
//! served somewhere in the pool. In probation they are its own for a while if other clients were
//! there before.
//!
//! The work is done only when a request failed. It grows with the backends of the pool.

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::backend::BackendState;
use super::fault_report::FaultReport;
use super::health::{BackendFault, Phase, RefusedGateway, Spared, Verdict};
use super::state::AdmissionState;
use crate::origin::Origin;
use sluice_core::base::BackendId;

impl AdmissionState {
    /// A request of `origin` failed through a fault of the backend.
    pub(super) fn failure(
        &mut self,
        backend: BackendId,
        fault: BackendFault,
        origin: Origin,
        now: Instant,
    ) -> FaultReport {
        let origin = Some(origin).filter(|_| fault.counts_by_origin());
        self.judge(backend, fault, origin, now)
    }

    /// Counts a fault. `origin`: whose request failed; `None`: the fault is a fact of the engine.
    fn judge(&mut self, backend: BackendId, fault: BackendFault, origin: Option<Origin>, now: Instant) -> FaultReport {
        let rules = self.rules;
        if let (Some(origin), Some(found)) = (origin, self.backend_mut(backend)) {
            found.health.note_failed(origin, now);
        }
        let spared = self.spared(backend, fault, origin, now);
        let Some(found) = self.backend_mut(backend) else { return FaultReport::default() };
        let verdict = found.health.failure(fault, spared, &rules, now);
        FaultReport { verdict, line: found.fault_lines.take(now) }
    }

    /// Why the backend must not be ejected for failures that requests can cause.
    fn spared(&self, backend: BackendId, fault: BackendFault, origin: Option<Origin>, now: Instant) -> Option<Spared> {
        let found = self.backend(backend)?;
        let others = || {
            let members = self.members(found.pool).iter().filter(|id| **id != backend);
            members.filter_map(|id| self.backend(*id)).filter(|other| other.is_in_service())
        };
        if origin.is_some_and(|origin| is_of_some_clients(found, others, origin, now)) {
            return Some(Spared::ServesOthers);
        }
        let out = others().filter(|other| other.health.phase() != Phase::Ready).count();
        let members = others().count() + 1;
        match () {
            () if out + 1 == members => Some(Spared::OnlyOne),
            // An engine that refuses the gateway serves no one.
            () if fault != BackendFault::Credentials && out + 1 > self.rules.most_ejected(members) => {
                Some(Spared::MaxEjected)
            }
            () => None,
        }
    }

    /// See [`Lease::refused_gateway`](super::lease::Lease::refused_gateway). `origin`: of the
    /// request that was refused.
    pub(super) fn refused_gateway(
        &mut self,
        backend: BackendId,
        refused: RefusedGateway,
        origin: Origin,
        now: Instant,
    ) -> bool {
        let origin = Some(origin).filter(|_| !refused.by_probe);
        let report = self.judge(backend, BackendFault::Credentials, origin, now);
        // The engine accepts the credentials with the requests of other clients.
        let is_of_request = report.verdict == Verdict::Spared(Spared::ServesOthers);
        !is_of_request && self.backend_mut(backend).is_some_and(|found| found.health.refuse(refused))
    }

    /// Ejects a backend that was found hung and cancels its exchanges.
    pub(super) fn mark_hung(&mut self, backend: BackendId, now: Instant) {
        self.failure(backend, BackendFault::Hung, Origin::default(), now);
        if let Some(found) = self.backend_mut(backend) {
            found.hangs += 1;
            std::mem::replace(&mut found.abort, CancellationToken::new()).cancel();
        }
    }
}

/// Whether the failures on `found` are failures of some clients only. `others`: the other backends
/// of its pool.
fn is_of_some_clients<'a, I>(found: &BackendState, others: impl Fn() -> I, origin: Origin, now: Instant) -> bool
where
    I: Iterator<Item = &'a BackendState>,
{
    let votes = found.health.origins().votes(now);
    if votes.all > 1 {
        return votes.serves_others();
    }
    let fails_elsewhere = others().any(|other| other.health.origins().fails(origin, now));
    if fails_elsewhere && others().any(|other| other.health.origins().serves_another(origin, now)) {
        return true;
    }
    let knows = |backend: &BackendState| backend.health.origins().knows_another(origin, now);
    found.health.phase() == Phase::Probation && (knows(found) || others().any(knows))
}
