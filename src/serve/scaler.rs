//! Every second, computes the engines that pools need, and makes the fleet run that number.
//!
//! This is a separate task, because it must go on while the online tuner is off. It takes the lock
//! of admission for a snapshot. It ends with the tasks that decide about engines: of two gateways,
//! one publishes and applies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sluice_cluster::PoolLoad;
use tokio::sync::watch;

use super::app::App;
use super::scaling::loads;

const INTERVAL: Duration = Duration::from_secs(1);

impl App {
    /// The load of the pools that are scaled, for other gateways.
    pub(super) fn loads(&self) -> BTreeMap<String, PoolLoad> {
        let config = self.config.load();
        match config.pools.iter().any(|pool| pool.autoscale.is_some()) {
            true => loads(&config, &self.admission.view(), &self.tuning.observer),
            false => BTreeMap::new(),
        }
    }

    pub(super) async fn keep_scaling(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        #[cfg(feature = "kubernetes")]
        let mut sets = super::replicas::Sets::default();
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let config = self.config.load_full();
            if config.pools.iter().any(|pool| pool.autoscale.is_some()) {
                let (view, pods, now) = (self.admission.view(), self.pods.views(), self.tuning.started.elapsed());
                let known = (&*self.fleet.views(), &*pods);
                let seen = (&*self.tuning.observer, self.cluster.as_ref().map(|cluster| &cluster.loads));
                for change in self.scaling.step(&config, &view, known, seen, now) {
                    tracing::info!("autoscale: {change}");
                }
            }
            // The tuner compares the engines that serve.
            let may_stop = self.tuning.tuner.lock().engine_change().is_none();
            for (pool, wanted) in self.scaling.targets(&config) {
                #[cfg(feature = "kubernetes")]
                if let Some(wanted) = wanted
                    && let Some(pods) =
                        config.pools.iter().find(|own| own.name == pool).and_then(|own| own.kubernetes.as_ref())
                {
                    sets.step(&self.fleet, (&pool, pods), &self.pods.views(), wanted, may_stop).await;
                    continue;
                }
                self.fleet.scale(&pool, wanted, may_stop).await;
            }
        }
    }
}
