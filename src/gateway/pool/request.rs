//! A request for admission: which pools may serve it and how much capacity it takes.
//!
//! The request path makes it from the placement and the estimate. Admission keeps it while the
//! request waits.

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
    /// The pool layout by which the request was classified. If no backend can take the request and
    /// a reload has changed the layout, the request is classified again.
    pub layout: u64,
    /// The home pool, which classification chose.
    pub home: PoolId,
    /// Pools to which the request may spill, in order of preference.
    pub spill: SmallVec<[PoolId; 2]>,
    /// The capacity that the request takes.
    pub need: Need,
    /// Lower goes first.
    pub priority: i32,
    /// The owner whose share of the home pool the request uses; `None` where the pool is not fair.
    pub fair: Option<FairOwner>,
    /// When the request was received, unchanged by retries and reloads. Decides the order of the
    /// queue.
    pub arrived: Instant,
    /// When the request began to wait for this lease: when it was received, or when it had to be
    /// repeated. `queue.timeout` counts from here.
    pub since: Instant,
    /// The beginnings of the prompt, to find engines that have them in the prefix cache.
    pub prefix: Arc<PromptPrefix>,
    /// The LoRA adapter that the request needs.
    pub adapter: Option<ModelKey>,
    /// The requirements of the request on an engine.
    pub asks: Asks,
    /// The facts that an engine must have to be chosen. Admission derives them from `asks` and the
    /// facts of engines.
    pub wants: Wants,
    /// Backends that have failed this request.
    pub avoid: SmallVec<[BackendId; 2]>,
    /// The only backend that can serve the request, by name: it holds the state that the request
    /// continues.
    pub only: Option<Arc<str>>,
    /// The request is in the arm of an experiment, and is served elsewhere if the arm cannot serve
    /// it. So it waits only while one of its backends is in rotation.
    pub pinned: bool,
}

impl AdmissionRequest {
    /// A request that came at `arrived` and has no owner, prefix, adapter or other demand.
    pub fn new(layout: u64, home: PoolId, need: Need, arrived: Instant) -> Self {
        Self {
            layout,
            home,
            spill: SmallVec::new(),
            need,
            priority: 0,
            fair: None,
            arrived,
            since: arrived,
            prefix: Arc::default(),
            adapter: None,
            asks: Asks::default(),
            wants: Wants::default(),
            avoid: SmallVec::new(),
            only: None,
            pinned: false,
        }
    }

    /// The owner in the home pool's table, once admission has looked it up.
    pub(super) fn owner(&self) -> OwnerIndex {
        self.fair.map_or(EVERYONE, |fair| fair.index)
    }

    /// The pools that may serve the request, in order.
    pub(super) fn pools(&self) -> impl Iterator<Item = PoolId> + '_ {
        std::iter::once(self.home).chain(self.spill.iter().copied())
    }
}
