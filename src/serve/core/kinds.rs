//! Kinds of engine that probes found. Pools with `engine = "auto"` take them. For other pools, the
//! kinds are compared with the configuration.
//!
//! A pool takes a kind when all of its recognised backends are of that kind. A backend of another
//! kind is named in the log once, and in `/admin/status` as long as it is there.

use super::Core;
use sluice_config::Config;
use sluice_core::engines::EngineKind;

impl Core {
    /// Puts the found kinds into a configuration. Returns the changes, by pool.
    pub(crate) fn put_kinds(&self, config: &mut Config) -> Vec<(String, EngineKind)> {
        let found = self.kinds.of_pools(&self.admission.view());
        config.put_engines(|pool| found.get(pool).copied())
    }

    /// Puts changed kinds in force, and logs backends that are of another kind than their pools.
    /// Blocks.
    pub(super) fn use_found_kinds(&self) {
        let alone = self.alone();
        let mut config = Config::clone(&self.config.load());
        let changes = self.put_kinds(&mut config);
        if !changes.is_empty() {
            self.switch(config, None);
        }
        drop(alone);
        for (pool, kind) in changes {
            let kind = kind.label();
            tracing::info!(
                "pool {pool}: its engines are of the kind {kind}; engine = \"{kind}\" in the pool fixes that"
            );
        }
        for (backend, advice) in self.kinds.news(&self.admission.view()) {
            tracing::warn!(backend, "{advice}");
        }
    }
}
