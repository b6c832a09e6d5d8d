//! Waits for a lease until one is granted, the deadline of the queue passes, the client leaves, or
//! the gateway aborts all requests.
//!
//! A client that leaves while queued leaves the queue at once, because the ticket is dropped with
//! the wait. When a reload removes the pool that a request waits in or is about to enter, the
//! request is classified by the newer routing table and enters again, with the original arrival
//! time. Only reloads repeat this loop; [`REENTRIES_MAX`] bounds it.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::classify::{self, Placement};
use super::exchange::Downstream;
use super::router::Router;
use super::routing_table::{PoolRoute, RoutingTable};
use crate::pool::{
    Admission, AdmissionDecision, AdmissionRequest, Asks, FairOwner, Lease, ModelKey, Need, WaitResult, Wants,
};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::{PromptPrefix, ShedReason, TooLarge};

/// How often a waiting request moves to another pool because of reloads.
const REENTRIES_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmitError {
    /// Not even an empty backend could take the request.
    Refused(TooLarge),
    Unserved,
    Shed {
        reason: ShedReason,
        home: PoolId,
    },
    ClientGone,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseRequest<'a> {
    pub(super) need: Need,
    pub(super) priority: i32,
    pub(super) fair: Option<FairOwner>,
    pub(super) arrived: Instant,
    pub(super) since: Instant,
    pub(super) model: &'a str,
    pub(super) prefix: &'a Arc<PromptPrefix>,
    pub(super) adapter: Option<ModelKey>,
    pub(super) asks: Asks,
    pub(super) avoid: &'a [BackendId],
    pub(super) only: Option<&'a Arc<str>>,
    /// The arm of an experiment determines the placement: the request is not classified again.
    pub(super) in_arm: bool,
    /// The arm has a pool or backends of its own, so the request does not wait for backends that
    /// are away.
    pub(super) pinned: bool,
}

/// A placement and the routing table that its positions refer to.
#[derive(Debug)]
pub(super) struct PlacedRequest {
    pub(super) table: Arc<RoutingTable>,
    pub(super) placement: Placement,
}

impl PlacedRequest {
    pub(super) fn home(&self) -> &PoolRoute {
        &self.table.pools[self.placement.home]
    }

    /// Classifies the request by a newer table. Returns `false` if no pool there serves the
    /// request.
    fn reclassify(&mut self, table: Arc<RoutingTable>, request: &LeaseRequest<'_>) -> bool {
        // A reload removed the pool, and with it the only backend that can serve the request.
        if request.only.is_some() {
            return false;
        }
        let model = table.model(request.model);
        let Some(placement) = model.and_then(|m| classify::place(&table, m.route, request.need.prompt_tokens)) else {
            return false;
        };
        *self = Self { table, placement };
        true
    }
}

/// Requests a lease and waits for it. Updates `placed` when a reload moves the request.
pub(super) async fn admit<D: Downstream>(
    admission: &Arc<Admission>,
    router: &Router,
    abort: &CancellationToken,
    placed: &mut PlacedRequest,
    request: &LeaseRequest<'_>,
    down: &mut D,
) -> Result<Lease, AdmitError> {
    for _ in 0..REENTRIES_MAX {
        match enter(admission, abort, placed, request, down).await? {
            WaitResult::Granted(lease) => return Ok(lease),
            WaitResult::Shed(reason) => return Err(AdmitError::Shed { reason, home: placed.home().id }),
            WaitResult::Unserved => return Err(AdmitError::Unserved),
            WaitResult::Reclassify => {}
        }
        let newer = tokio::select! {
            biased;
            newer = router.newer_than(&placed.table) => newer,
            () = down.gone() => return Err(AdmitError::ClientGone),
        };
        if request.in_arm || !placed.reclassify(newer, request) {
            break;
        }
    }
    Err(AdmitError::Shed { reason: ShedReason::NoBackend, home: placed.home().id })
}

/// Enters admission once, and waits in the queue if there is no room.
async fn enter<D: Downstream>(
    admission: &Arc<Admission>,
    abort: &CancellationToken,
    placed: &PlacedRequest,
    request: &LeaseRequest<'_>,
    down: &mut D,
) -> Result<WaitResult, AdmitError> {
    let home = placed.home().id;
    let shed = |reason| AdmitError::Shed { reason, home };
    let decision = admission.enter(AdmissionRequest {
        layout: placed.table.layout,
        home,
        spill: placed.placement.spill.clone(),
        need: request.need,
        priority: request.priority,
        fair: request.fair,
        arrived: request.arrived,
        since: request.since,
        prefix: Arc::clone(request.prefix),
        adapter: request.adapter,
        asks: request.asks,
        wants: Wants::default(),
        avoid: request.avoid.into(),
        only: request.only.cloned(),
        pinned: request.pinned,
    });
    match decision {
        AdmissionDecision::Granted(lease) => Ok(WaitResult::Granted(lease)),
        AdmissionDecision::Refused(limit) => Err(AdmitError::Refused(limit)),
        AdmissionDecision::Shed(reason) => Err(shed(reason)),
        AdmissionDecision::Reclassify => Ok(WaitResult::Reclassify),
        AdmissionDecision::Queued(ticket, deadline) => tokio::select! {
            biased;
            () = abort.cancelled() => Err(shed(ShedReason::ShuttingDown)),
            // Polled before the ticket: when many clients leave at once, none of them may be given
            // the room that another one has left.
            () = down.gone() => Err(AdmitError::ClientGone),
            waited = timeout_at(deadline, ticket) => waited.map_err(|_| shed(admission.timeout_reason(home, &placed.placement.spill))),
        },
    }
}
