//! Waiting for a lease: until there is one, the deadline, or the client leaves.
//!
//! A client that leaves while queued leaves the line at once: the ticket is dropped with the wait.
//! When a reload removes the pool somebody waits in, or what he is about to enter, the request is classified by the new
//! plan and enters again with its age; a loop that is bounded by [`REENTRIES_MAX`], because only reloads drive it.
//! Admission knows of a reload a moment before the new plan is in force: that moment is waited for.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::Flow;
use super::classify;
use super::exchange::Downstream;
use super::record::Recorder;
use super::routing_table::RoutingTable;
use crate::pool::{AdmissionDecision, AdmissionRequest, Lease, Need, WaitResult};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::ShedReason;

/// How often a waiting request follows its pool through reloads.
const REENTRIES_MAX: usize = 8;

/// Why there is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmitError {
    /// Shed, by the pool it was at home in.
    Shed(ShedReason, PoolId),
    /// The client left while it waited.
    ClientGone,
}

/// What is asked for, apart from where.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseRequest<'a> {
    pub(super) need: Need,
    pub(super) priority: i32,
    pub(super) arrived: Instant,
    pub(super) model: &'a str,
    pub(super) avoid: &'a [BackendId],
}

/// Asks for a lease and waits for it.
pub(super) async fn admit<U, R, D>(
    flow: &Flow<U, R>,
    plan: &Arc<RoutingTable>,
    placement: &classify::Placement,
    wish: LeaseRequest<'_>,
    down: &mut D,
) -> Result<Lease, AdmitError>
where
    U: super::Upstream,
    R: Recorder,
    D: Downstream,
{
    let (mut plan, mut placement) = (Arc::clone(plan), placement.clone());
    for _ in 0..REENTRIES_MAX {
        let home = plan.pools[placement.home].id;
        let ask = AdmissionRequest {
            layout: plan.layout,
            home,
            spill: placement.spill.clone(),
            need: wish.need,
            priority: wish.priority,
            arrived: wish.arrived,
            avoid: wish.avoid.into(),
        };
        let waited = match flow.admission().enter(ask) {
            AdmissionDecision::Granted(lease) => return Ok(lease),
            AdmissionDecision::Shed(shed) => return Err(AdmitError::Shed(shed, home)),
            AdmissionDecision::Reclassify => WaitResult::Reclassify,
            AdmissionDecision::Queued(ticket, deadline) => tokio::select! {
                biased;
                waited = timeout_at(deadline, ticket) => {
                    waited.map_err(|_| AdmitError::Shed(ShedReason::QueueTimeout, home))?
                }
                () = down.gone() => return Err(AdmitError::ClientGone),
            },
        };
        if let WaitResult::Granted(lease) = waited {
            return Ok(lease);
        }
        plan = tokio::select! {
            biased;
            newer = flow.newer_routing_table(&plan) => newer,
            () = down.gone() => return Err(AdmitError::ClientGone),
        };
        let again = plan.model(wish.model).and_then(|(m, _)| classify::place(&plan, m, wish.need.prompt_tokens));
        placement = again.ok_or(AdmitError::Shed(ShedReason::NoBackend, home))?;
    }
    Err(AdmitError::Shed(ShedReason::NoBackend, plan.pools[placement.home].id))
}
