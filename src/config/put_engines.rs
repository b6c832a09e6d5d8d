//! Puts the kinds that probes found into a configuration.
//!
//! Only pools with `engine = "auto"` whose engines run without the gateway take a found kind,
//! because the flags of other engines were checked by the rules of the default kind. Every kind
//! that probes can find has the same default of `slots`, so no other value of the pool changes.

use super::backend::Target;
use super::pool::Pool;
use super::root::Config;
use sluice_core::engines::EngineKind;

impl Pool {
    /// Whether probes may set the kind of the engines.
    pub fn engine_is_open(&self) -> bool {
        let is_started = |target: &Target| !matches!(target, Target::Url(_));
        let restarts_pods = self.kubernetes.as_ref().is_some_and(|pods| pods.statefulset.is_some());
        self.engine.is_auto && !restarts_pods && !self.backends.iter().any(|backend| is_started(&backend.target))
    }
}

impl Config {
    /// Sets the kind of each pool whose kind is open to the kind that probes found. `found` takes
    /// the name of a pool. Returns the changes.
    pub fn put_engines(&mut self, found: impl Fn(&str) -> Option<EngineKind>) -> Vec<(String, EngineKind)> {
        let mut changes = Vec::new();
        for pool in self.pools.iter_mut().filter(|pool| pool.engine_is_open()) {
            let Some(kind) = found(&pool.name).filter(|kind| *kind != *pool.engine) else { continue };
            pool.engine.kind = kind;
            pool.backends.iter_mut().for_each(|backend| backend.engine = kind);
            changes.push((pool.name.clone(), kind));
        }
        changes
    }
}
