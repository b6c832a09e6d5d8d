//! The arm of a request, and where it serves the request.
//!
//! What is sticky about a request is read here, from its headers, its key, or its body; a request that has nothing of the kind
//! takes part in no experiment. An arm may send another model name upstream, and may serve the request in a pool or on backends
//! of its own. When it cannot, the request is served as if there were no experiment (`forward.rs`).

use std::sync::Arc;

use smallvec::SmallVec;

use super::classify::{self, Placement};
use super::incoming::IncomingRequest;
use super::keys::ApiKey;
use super::record::{RecordGuard, Recorder};
use super::routing_table::{ModelRoute, RoutingTable};
use crate::config::Sticky;
use crate::experiment::{Assigned, ExperimentPlan, Subject, Unit};
use sluice_core::base::BackendId;
use sluice_core::openai::{EditedBody, RequestView};

/// Bytes of a prompt that are its beginning for [`Sticky::Prefix`].
const PREFIX_BYTES: usize = 1_024;
/// The session of a request whose body names none.
const SESSION_HEADER: &str = "x-session-id";

/// Where and how an arm serves a request.
#[derive(Debug)]
pub(super) struct ArmTarget {
    placement: Option<Placement>,
    /// The model name to send upstream.
    pub(super) model: Option<Arc<str>>,
    /// The backends of its pool that are not its own.
    pub(super) others: SmallVec<[BackendId; 4]>,
    /// Whether it has a pool of its own, perhaps with backends of its own.
    pub(super) is_placed: bool,
    /// The body as it would be without the experiment, where that is another one.
    pub(super) body_without: Option<EditedBody>,
}

/// Assigns the request to an arm, if it belongs to an experiment, and notes that in its record. A copy is in the arm that it was
/// made for.
pub(super) fn assign<R: Recorder>(
    incoming: &IncomingRequest,
    view: &RequestView<'_>,
    model: &ModelRoute,
    class: usize,
    record: &mut RecordGuard<'_, R>,
) -> Option<Assigned> {
    if let Some(arm) = &incoming.copy_for {
        record.arm = Some(Arc::clone(&arm.arm().label));
        record.assigned = Some(arm.clone());
        return Some(arm.clone());
    }
    // What no engine is known to serve would be sent to two of them.
    if !model.is_known {
        return None;
    }
    let key = incoming.key.as_ref();
    let subject = Subject { model: model.declared, key: key.map(|key| &**key.name()), class };
    let may_use = |model| key.is_none_or(|key| key.may_use(Some(model)));
    let assigned = incoming.routing.experiments.assign(&subject, |plan| unit(plan, incoming, view), may_use)?;
    record.arm = Some(Arc::clone(&assigned.arm().label));
    assigned.note();
    record.assigned = Some(assigned.clone());
    Some(assigned)
}

/// What is sticky about the request.
fn unit(plan: &ExperimentPlan, incoming: &IncomingRequest, view: &RequestView<'_>) -> Option<Unit> {
    let header = |name: &str| incoming.headers.get(name).map(|value| value.as_bytes()).filter(|name| !name.is_empty());
    let name = match plan.sticky {
        Sticky::Header => header(&plan.header)?,
        Sticky::User => view.user.as_deref()?.as_bytes(),
        Sticky::Key => incoming.key.as_ref().map(ApiKey::name)?.as_bytes(),
        Sticky::Session => view.session.as_deref().map(str::as_bytes).or_else(|| header(SESSION_HEADER))?,
        Sticky::Prefix => {
            let prompt = incoming.body.get(view.prompt_start?..)?;
            &prompt[..prompt.len().min(PREFIX_BYTES)]
        }
        Sticky::Request => incoming.upstream_id.as_bytes(),
    };
    Some(Unit::new(name))
}

impl ArmTarget {
    /// The target of an arm for a prompt of `tokens`. `None` where the arm serves as any request is served, and where its
    /// model has no pool for such a prompt.
    pub(super) fn of(assigned: &Assigned, table: &RoutingTable, tokens: u64) -> Option<Self> {
        let arm = assigned.arm();
        let model = arm.model.as_ref().map(|(name, _)| Arc::clone(name));
        let mut others = SmallVec::new();
        let placement = match (arm.pool, &model) {
            (Some(pool), _) => {
                let own = |position| arm.backends.is_empty() || arm.backends.contains(&position);
                let all = table.pools[pool].backends.iter().enumerate();
                others.extend(all.filter(|(position, _)| !own(*position)).map(|(_, id)| *id));
                Placement { home: pool, spill: SmallVec::new() }
            }
            (None, Some(name)) => classify::place(table, table.model(name)?.route, tokens)?,
            (None, None) => return None,
        };
        Some(Self { placement: Some(placement), model, others, is_placed: arm.pool.is_some(), body_without: None })
    }

    /// Where it is placed; once.
    pub(super) fn take_placement(&mut self) -> Option<Placement> {
        self.placement.take()
    }
}
