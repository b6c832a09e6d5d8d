//! The engine of a backend as the gateway knows it: facts that the engine reported, and refusals
//! that correct them.
//!
//! `served.rs` has the facts and `serving.rs` the effect on requests. A refusal that came after a
//! reading of the facts began still counts after the reading. Bound: [`REFUSALS_MAX`] refusals.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::known_routes::KnownRoutes;
use super::served::{Facts, Lack, ModelKey, RouteSet, Served};
use super::service::Cordon;

/// The most refusals that are kept, so that a reading that began earlier does not undo them.
const REFUSALS_MAX: usize = 8;

#[derive(Clone, Debug, Default)]
pub(super) struct KnownEngine {
    pub(super) facts: Facts,
    /// The facts must be read again: the engine was replaced, or refused a request that the facts
    /// allow.
    pub(super) facts_due: bool,
    /// The page of routes must be read: an engine of the pool has refused a route.
    pub(super) routes_due: bool,
    /// The flags of the engine say that it schedules by priority.
    pub(super) by_priority: bool,
    /// The readings and refusals from which `facts.routes` follows.
    routes: KnownRoutes,
    /// The listed names with their roots: the folder or name that each was loaded from. Sorted.
    roots: Arc<[(ModelKey, ModelKey)]>,
    /// The latest refusals that corrected the facts.
    refusals: SmallVec<[(Lack, Instant); 2]>,
}

impl KnownEngine {
    /// The same engine under another name or pool.
    pub(super) fn inherited(&self) -> Self {
        let Self { facts, by_priority, routes, roots, .. } = self.clone();
        Self { facts, by_priority, routes, roots, ..Self::default() }
    }

    /// The engine was replaced. The old names stay until the new engine is read; then waiters for
    /// old names are judged again.
    pub(super) fn replaced(&mut self) {
        self.facts.max_model_len = None;
        self.facts_due = true;
        self.roots = Arc::default();
    }

    pub(super) fn set_roots(&mut self, roots: Arc<[(ModelKey, ModelKey)]>) {
        self.roots = roots;
    }

    /// The root of a listed name, if the engine has reported it.
    pub(super) fn root(&self, name: ModelKey) -> Option<ModelKey> {
        let at = self.roots.binary_search_by_key(&name, |(name, _)| *name).ok()?;
        Some(self.roots[at].1)
    }

    /// The engine has started again.
    pub(super) fn restarted(&mut self) {
        self.routes_due |= self.routes.is_any();
        self.routes = KnownRoutes::default();
        self.facts.routes = self.routes.set();
        self.refusals.clear();
    }

    /// Takes over the listed models and context limit, by a reading that began at `begun`.
    pub(super) fn read(&mut self, served: Served, max_model_len: Option<u64>, begun: Instant, cordon: Cordon) {
        self.facts_due = cordon != Cordon::Open;
        if self.facts_due && self.facts.served != Served::Unknown {
            return;
        }
        self.facts.served = served;
        self.facts.max_model_len = max_model_len.or(self.facts.max_model_len);
        self.refusals.retain(|(_, at)| *at > begun);
        for (lack, _) in &self.refusals {
            self.facts_due |= self.facts.correct(*lack) && !self.is_unreadable();
        }
    }

    /// Takes over the page of routes, by a reading that began at `begun`; `None`: there is no page.
    pub(super) fn read_routes(&mut self, routes: Option<RouteSet>, begun: Instant) {
        self.routes_due = self.routes.read(routes, begun);
        self.facts.routes = self.routes.set();
    }

    /// The engine refused a request at `now`. Returns whether that corrects the facts.
    pub(super) fn refused(&mut self, lack: Lack, now: Instant) -> bool {
        let is_news = self.facts.correct(lack);
        if let Lack::Route(route) = lack {
            self.routes.deny(route, now);
            return is_news;
        }
        // An engine without a readable list is not read again at once.
        self.facts_due |= (is_news || lack == Lack::Length(None)) && !self.is_unreadable();
        self.facts_due |= lack == Lack::Rank;
        if is_news {
            if self.refusals.len() >= REFUSALS_MAX {
                self.refusals.remove(0);
            }
            self.refusals.push((lack, now));
        }
        is_news
    }

    fn is_unreadable(&self) -> bool {
        matches!(self.facts.served, Served::Unreadable { .. })
    }

    /// Forgets refusals and readings of routes that are too old at `now`.
    pub(super) fn expire_routes(&mut self, now: Instant) {
        if self.routes.is_any() {
            self.routes.expire(now);
            self.facts.routes = self.routes.set();
        }
    }

    /// Whether the engine may serve a model: the facts do not exclude the model, or the engine is
    /// changing.
    pub(super) fn may_serve(&self, model: ModelKey, cordon: Cordon) -> bool {
        let changes = self.facts_due || !matches!(cordon, Cordon::Open | Cordon::Down);
        changes || self.facts.served.has(model)
    }
}
