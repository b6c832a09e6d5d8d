//! What a request asks of admission: which pools may serve it and what it takes.
//!
//! Made by the request path from the placement and the estimate; admission keeps it while the request waits.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::capacity::Need;
use super::fair_owner::{EVERYONE, FairOwner};
use super::queue::OwnerIndex;
use super::served::{Asks, ModelKey, Wants};
use sluice_core::base::{BackendId, PoolId};
use sluice_core::openai::PromptPrefix;

/// A request for a lease.
#[derive(Clone, Debug)]
pub struct AdmissionRequest {
    /// Version of the pool layout that it was classified by. If no backend can take it and a reload has changed the
    /// layout, it is classified again.
    pub layout: u64,
    /// The pool its prompt length belongs to.
    pub home: PoolId,
    /// Pools that it may spill to, in order of preference.
    pub spill: SmallVec<[PoolId; 2]>,
    /// The capacity it takes.
    pub need: Need,
    /// Lower goes first.
    pub priority: i32,
    /// Whose share of the home pool it uses; `None` where the pool does not share itself out.
    pub fair: Option<FairOwner>,
    /// When the request was received; unchanged by retries and reloads. It decides the order of the queue.
    pub arrived: Instant,
    /// When it began to wait for this lease: when it was received, or when it has to be repeated. `queue.timeout` counts from there.
    pub since: Instant,
    /// The beginnings of its prompt, by which engines are found that have them.
    pub prefix: Arc<PromptPrefix>,
    /// The LoRA adapter that it needs.
    pub adapter: Option<ModelKey>,
    /// What it asks of an engine.
    pub asks: Asks,
    /// What an engine must have to be chosen; set by admission from `asks` and what the engines say of themselves.
    pub wants: Wants,
    /// Backends that have failed this request.
    pub avoid: SmallVec<[BackendId; 2]>,
    /// The only backend that can serve it, by name: it holds what the request continues.
    pub only: Option<Arc<str>>,
    /// It is in the arm of an experiment, and is served in another place if the arm cannot serve it. So it waits only while one of
    /// its backends is in rotation.
    pub pinned: bool,
}

impl AdmissionRequest {
    /// Its owner in the home pool's table, once admission has looked it up.
    pub(super) fn owner(&self) -> OwnerIndex {
        self.fair.map_or(EVERYONE, |fair| fair.index)
    }

    /// The pools that may serve it, in order.
    pub(super) fn pools(&self) -> impl Iterator<Item = PoolId> + '_ {
        std::iter::once(self.home).chain(self.spill.iter().copied())
    }
}
