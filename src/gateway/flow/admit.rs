//! Waits for a lease until one is granted, the deadline of the queue passes, the client leaves, or
//! the gateway aborts all requests.
//!
//! If a client leaves while its request is queued, the request leaves the queue at once, because
//! the ticket is dropped with the wait. When a reload removes the pool that a request waits in or
//! is about to enter, the request is classified by the newer routing table and enters again, with
//! the original arrival time. [`REENTRIES_MAX`] bounds how often.

use std::sync::Arc;

use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use super::classify::{self, PlacedRequest};
use super::exchange::Downstream;
use super::router::Router;
use super::routing_table::RoutingTable;
use crate::pool::{Admission, AdmissionDecision, Lease, WaitResult};
use sluice_core::base::PoolId;
use sluice_core::openai::{ShedReason, TooLarge};

/// How often one request may enter admission. Each entry but the first follows a reload.
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

/// Asks admission for a lease and waits for it. Updates `placed` when a reload moves the request.
/// `model`: the name by which the request is classified again; `None`: an arm of an experiment
/// determines the placement.
pub(super) async fn admit<D: Downstream>(
    admission: &Arc<Admission>,
    router: &Router,
    abort: &CancellationToken,
    placed: &mut PlacedRequest,
    model: Option<&str>,
    down: &mut D,
) -> Result<Lease, AdmitError> {
    for _ in 0..REENTRIES_MAX {
        match enter(admission, abort, placed, down).await? {
            WaitResult::Granted(lease) => return Ok(lease),
            WaitResult::Shed(reason) => return Err(AdmitError::Shed { reason, home: placed.request.home }),
            WaitResult::Unserved => return Err(AdmitError::Unserved),
            WaitResult::Reclassify => {}
        }
        let newer = tokio::select! {
            biased;
            newer = router.newer_than(&placed.table) => newer,
            () = down.gone() => return Err(AdmitError::ClientGone),
        };
        if !model.is_some_and(|model| reclassify(placed, newer, model)) {
            break;
        }
    }
    Err(AdmitError::Shed { reason: ShedReason::NoBackend, home: placed.request.home })
}

/// Classifies the request by a newer table. Returns `false` if no pool of that table serves the
/// request.
fn reclassify(placed: &mut PlacedRequest, table: Arc<RoutingTable>, model: &str) -> bool {
    // A reload removed the pool, and with it the only backend that can serve the request.
    if placed.request.only.is_some() {
        return false;
    }
    let tokens = placed.request.need.prompt_tokens;
    let placement = table.model(model).and_then(|found| classify::place(&table, found.route, tokens));
    placement.map(|placement| placed.move_to(table, placement)).is_some()
}

/// Enters admission once, and waits in the queue if there is no room.
async fn enter<D: Downstream>(
    admission: &Arc<Admission>,
    abort: &CancellationToken,
    placed: &PlacedRequest,
    down: &mut D,
) -> Result<WaitResult<Lease>, AdmitError> {
    let request = &placed.request;
    let shed = |reason| AdmitError::Shed { reason, home: request.home };
    match admission.enter(request.clone()) {
        AdmissionDecision::Granted(lease) => Ok(WaitResult::Granted(lease)),
        AdmissionDecision::Refused(limit) => Err(AdmitError::Refused(limit)),
        AdmissionDecision::Shed(reason) => Err(shed(reason)),
        AdmissionDecision::Reclassify => Ok(WaitResult::Reclassify),
        AdmissionDecision::Queued(ticket, deadline) => tokio::select! {
            biased;
            () = abort.cancelled() => Err(shed(ShedReason::ShuttingDown)),
            // Polled before the ticket: when many clients leave at once, a request whose client has
            // left must not get the room that another request freed.
            () = down.gone() => Err(AdmitError::ClientGone),
            waited = timeout_at(deadline, ticket) => {
                waited.map_err(|_| shed(admission.timeout_reason(request.home, &request.spill)))
            }
        },
    }
}
