//! Assigns a request to an arm of an experiment, and finds the place where the arm serves the
//! request.
//!
//! The value by which a request sticks to an arm is read here from the headers, the key or the
//! body; a request without that value takes part in no experiment. An arm may send another model
//! name upstream, and may serve the request in another pool or on certain backends of a pool. If
//! the arm cannot serve the request, it is served as if there were no experiment
//! (`forward/fall_back.rs`).

use std::sync::Arc;

use smallvec::SmallVec;

use super::classify::{self, Placement};
use super::incoming::IncomingRequest;
use super::keys::ApiKey;
use super::record::{RecordGuard, Recorder};
use super::routing_table::{ModelRoute, RoutingTable};
use crate::experiment::ledger::stratum;
use crate::experiment::{Assigned, ExperimentPlan, Subject, Unit};
use sluice_config::Sticky;
use sluice_core::base::BackendId;
use sluice_core::openai::RequestView;

/// Number of bytes at the beginning of a prompt that [`Sticky::Prefix`] hashes.
const PREFIX_BYTES: usize = 1_024;
/// Names the session of a request whose body names none.
const SESSION_HEADER: &str = "x-session-id";

/// How an arm serves a request, if that differs from how the request is served without the
/// experiment.
#[derive(Debug)]
pub(super) struct ArmTarget {
    /// The model name that is sent upstream, if it differs from the client's.
    pub(super) model: Option<Arc<str>>,
    /// The backends of the arm's pool that the arm may not use.
    pub(super) others: SmallVec<[BackendId; 2]>,
}

/// Assigns the request to an arm if it belongs to an experiment, and notes the arm in the record. A
/// copy belongs to the arm for which it was made.
pub(super) fn assign<R: Recorder>(
    incoming: &IncomingRequest,
    view: &RequestView<'_>,
    model: &ModelRoute,
    home: usize,
    record: &mut RecordGuard<'_, R>,
) -> Option<Assigned> {
    if let Some(arm) = &incoming.copy_for {
        record.arm = Some(Arc::clone(&arm.arm().label));
        record.assigned = Some(arm.clone());
        return Some(arm.clone());
    }
    // A request for a model that no engine is known to serve would be sent twice: for the arm, and
    // again without it.
    if !model.is_known {
        return None;
    }
    let key = incoming.key.as_ref();
    let stratum = stratum(record.class_index(), record.estimate.map_or(0, |estimate| estimate.tokens));
    let subject = Subject { model: model.declared, key: key.map(|key| &**key.name()), home, stratum };
    let may_use = |model| key.is_none_or(|key| key.may_use(Some(model)));
    let assigned = incoming.routing.experiments.assign(&subject, |plan| unit(plan, incoming, view), may_use)?;
    record.arm = Some(Arc::clone(&assigned.arm().label));
    assigned.note();
    record.assigned = Some(assigned.clone());
    Some(assigned)
}

/// The unit of the request by which the experiment assigns arms; `None` if the request has none.
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
    /// The target of an arm for a prompt of `tokens`, and the placement there. `None` if the arm
    /// serves requests as they are served without it, or if no pool serves the arm's model for such
    /// a prompt.
    pub(super) fn of(assigned: &Assigned, table: &RoutingTable, tokens: u64) -> Option<(Self, Placement)> {
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
        Some((Self { model, others }, placement))
    }
}
