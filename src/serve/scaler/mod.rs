//! Every second, computes the engines that pools need, and makes the fleet run that number.
//!
//! `demand.rs` computes the number; `replicas.rs` sets it for pools of pods. The task runs even if
//! the online tuner is off. It ends with the tasks that decide about engines, so of two gateways
//! only one publishes and applies.

mod demand;
#[cfg(feature = "kubernetes")]
mod replicas;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sluice_cluster::PoolLoad;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::core::Core;
use crate::pods::Pods;
use crate::tuner::TunerService;
use demand::Demand;
use sluice_gateway::telemetry::PoolEngines;

const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct ScalerService {
    core: Arc<Core>,
    /// Counts the finished requests, and knows whether the tuner compares engines.
    tuner: Arc<TunerService>,
    pods: Arc<Pods>,
    demand: Demand,
}

impl ScalerService {
    pub(crate) fn new(core: Arc<Core>, tuner: Arc<TunerService>, pods: Arc<Pods>) -> Self {
        Self { core, tuner, pods, demand: Demand::default() }
    }

    pub(crate) fn start(self: &Arc<Self>, end: &watch::Receiver<bool>) -> JoinHandle<()> {
        tokio::spawn(Arc::clone(self).keep_scaling(end.clone()))
    }

    pub(crate) fn clear(&self) {
        self.demand.clear();
    }

    pub(crate) fn view(&self) -> Vec<PoolEngines> {
        self.demand.view()
    }

    pub(crate) fn loads(&self) -> BTreeMap<String, PoolLoad> {
        let config = self.core.config.load();
        match config.pools.iter().any(|pool| pool.autoscale.is_some()) {
            true => demand::loads(&config, &self.core.admission.view(), &self.tuner.state.observer),
            false => BTreeMap::new(),
        }
    }

    async fn keep_scaling(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        #[cfg(feature = "kubernetes")]
        let mut sets = replicas::Sets::default();
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let config = self.core.config.load_full();
            if config.pools.iter().any(|pool| pool.autoscale.is_some()) {
                let (view, pods, now) =
                    (self.core.admission.view(), self.pods.views(), self.tuner.state.started.elapsed());
                let known = (&*self.core.fleet.views(), &*pods);
                let seen = (&*self.tuner.state.observer, self.core.cluster.as_ref().map(|cluster| &cluster.loads));
                for change in self.demand.step(&config, &view, known, seen, now) {
                    tracing::info!("autoscale: {change}");
                }
            }
            let may_stop = self.tuner.state.tuner.lock().engine_change().is_none();
            for (pool, wanted) in self.demand.targets(&config) {
                #[cfg(feature = "kubernetes")]
                if let Some(wanted) = wanted
                    && let Some(pods) =
                        config.pools.iter().find(|own| own.name == pool).and_then(|own| own.kubernetes.as_ref())
                {
                    sets.step(&self.core.fleet, (&pool, pods), &self.pods.views(), wanted, may_stop).await;
                    continue;
                }
                self.core.fleet.scale(&pool, wanted, may_stop).await;
            }
        }
    }
}
