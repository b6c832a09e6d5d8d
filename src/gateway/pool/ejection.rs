//! Which failures eject a backend, by comparison with the rest of the pool.
//!
//! `health.rs` counts the failures of one backend. Here they are compared with other clients and
//! other backends; the ranks of one server count as one. In these cases, failures are the client's
//! fault and eject nothing:
//!
//! - The backend serves other clients (`recent_origins.rs`).
//! - Only this client used the backend lately, it also fails on another backend of the pool, and
//!   the pool serves other clients.
//! - The backend is in probation, and other clients used the pool before. This excuses a limited
//!   number of failures.
//!
//! The work is done only after a failure, and grows with the backends of the pool.

use tokio::time::Instant;

use super::backend::BackendState;
use super::fault_report::FaultReport;
use super::health::{BackendFault, Phase, RefusedGateway, Spared, Verdict};
use super::state::AdmissionState;
use crate::origin::Origin;
use sluice_core::base::BackendId;

impl AdmissionState {
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

    /// Counts a fault. `origin`: the client whose request failed; `None`: the fault is a fact of
    /// the engine.
    fn judge(&mut self, backend: BackendId, fault: BackendFault, origin: Option<Origin>, now: Instant) -> FaultReport {
        let rules = self.rules;
        if let (Some(origin), Some(found)) = (origin, self.backend_mut(backend)) {
            found.health.note_failed(origin, now);
        }
        let spared = self.spared(backend, fault, origin, now);
        let Some(found) = self.backend_mut(backend) else { return FaultReport::default() };
        let verdict = found.health.failure(fault, spared, &rules, now);
        let line = found.fault_lines.take(now);
        self.eject_ranks(backend, verdict);
        FaultReport { verdict, line }
    }

    /// Why the backend must not be ejected for failures that requests can cause.
    fn spared(&self, backend: BackendId, fault: BackendFault, origin: Option<Origin>, now: Instant) -> Option<Spared> {
        let found = self.backend(backend)?;
        let others = || {
            let members = self.members(found.pool).iter().filter(|id| **id != backend);
            members.filter_map(|id| self.backend(*id)).filter(|other| other.service.is_open())
        };
        // The ranks of one server are out of rotation together.
        let servers = || {
            let others = self.servers(found.pool).filter(|id| *id != backend && !self.share_a_server(*id, backend));
            others.filter_map(|id| self.backend(id)).filter(|other| other.service.is_open())
        };
        if origin.is_some_and(|origin| is_of_some_clients(found, others, origin, now)) {
            return Some(Spared::ServesOthers);
        }
        let out = servers().filter(|other| other.health.phase() != Phase::Ready).count();
        let members = servers().count() + 1;
        match () {
            () if out + 1 == members => Some(Spared::OnlyOne),
            // An engine that refuses the gateway serves no client.
            () if fault != BackendFault::Credentials && out + 1 > self.rules.most_ejected(members) => {
                Some(Spared::MaxEjected)
            }
            () => None,
        }
    }

    /// See [`Lease::refused_gateway`](super::lease::Lease::refused_gateway). `origin`: the client
    /// whose request was refused.
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

    pub(super) fn mark_hung(&mut self, backend: BackendId, now: Instant) {
        self.failure(backend, BackendFault::Hung, Origin::default(), now);
        if let Some(found) = self.backend_mut(backend) {
            found.liveness.hung();
        }
    }
}

/// Whether the failures on `found` concern only some clients. `others`: the other backends of the
/// pool.
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
