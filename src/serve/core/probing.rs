//! Tasks of the core: probes of the backends, checks of engines with silent streams, and copies for
//! shadow arms.
//!
//! A probe asks every backend for health and models. New models cause a new routing table, on a
//! thread that may block, because many keys make that slow. Bounds: one round every
//! `health.probe_interval`, and one whenever a configuration comes into force.

use std::sync::Arc;

use tokio::sync::watch;

use super::Core;
use sluice_fleet::{Prober, follow_kv_events, watch_silent_streams};
use sluice_gateway::flow::RoutingTable;

impl Core {
    /// Probes until `end` is true.
    pub(crate) async fn keep_probing(self: Arc<Self>, mut prober: Prober, mut end: watch::Receiver<bool>) {
        loop {
            let interval = self.config.load().health.probe_interval;
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.probe_now.notified() => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            self.probe(&mut prober).await;
        }
    }

    /// Checks engines until `end` is true.
    pub(crate) async fn keep_watching_silent_streams(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let limit = || self.config.load().health.probe_timeout;
        tokio::select! {
            () = watch_silent_streams(Arc::clone(&self.admission), limit) => {}
            _ = end.wait_for(|ending| *ending) => {}
        }
    }

    pub(crate) async fn keep_following_kv_events(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        tokio::select! {
            () = follow_kv_events(Arc::clone(&self.admission)) => {}
            _ = end.wait_for(|ending| *ending) => {}
        }
    }

    pub(crate) async fn probe(self: &Arc<Self>, prober: &mut Prober) {
        let config = self.config.load_full();
        let rules = config.health.clone();
        prober.deadlines =
            config.pools.iter().filter_map(|pool| Some((pool.name.as_str().into(), pool.deadline?))).collect();
        prober.forwards_keys = !self.flow.routing_table().keys.is_required();
        prober.await_models = self.learned.experiments.is_any_waiting();
        let changed = prober.probe_all(&rules).await;
        if std::mem::take(&mut prober.kinds_changed) {
            let core = Arc::clone(self);
            if let Err(error) = tokio::task::spawn_blocking(move || core.use_found_kinds()).await {
                tracing::error!(%error, "the kinds of engine could not be put in force");
            }
        }
        self.note_served_models();
        if !changed && !self.flow.has_replaced_tables() {
            return;
        }
        let core = Arc::clone(self);
        let rebuilt = tokio::task::spawn_blocking(move || {
            if changed {
                core.rebuild_routing();
            }
            core.flow.drop_unused_tables();
        });
        if let Err(error) = rebuilt.await {
            tracing::error!(%error, "the routing table could not be rebuilt");
        }
    }

    fn rebuild_routing(&self) {
        let loaded = self.loaded.lock();
        let (config, reported) = (self.config.load_full(), self.reported.names());
        self.learned.set_adapters(self.reported.adapters());
        self.flow.set_routing_table(RoutingTable::new(
            config,
            &loaded.layout,
            &reported,
            &loaded.counters,
            &self.learned,
        ));
    }

    /// Serves copies of requests from this call on, until `end` is true.
    pub(crate) fn keep_serving_copies(&self, mut end: watch::Receiver<bool>) -> impl Future<Output = ()> + use<> {
        let serving = Arc::clone(&self.flow).serve_copies();
        async move {
            tokio::select! {
                () = serving => {}
                _ = end.wait_for(|ending| *ending) => {}
            }
        }
    }
}
