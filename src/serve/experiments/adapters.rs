//! Adapters of experiments on the engines: loads them into external engines, and watches the
//! engines that serve them.
//!
//! The gateway's own engines get their adapters when they start. Bounds: one look every
//! [`LOOK_INTERVAL`]. A refused adapter is tried again after [`LOAD_INTERVAL`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::{Core, backends_of};
use sluice_config::Target;
use sluice_core::base::BackendId;
use sluice_core::vllm::metrics::MetricsSnapshot;
use sluice_gateway::experiment::{EngineAdapters, Experiment, Phase};

const LOOK_INTERVAL: Duration = Duration::from_secs(2);
const LOAD_INTERVAL: Duration = Duration::from_secs(30);

pub(super) async fn keep_looking(core: Arc<Core>, mut end: watch::Receiver<bool>) {
    let adapters = Adapters { core: &core };
    let mut tried = HashMap::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
        let look = async {
            adapters.load(&mut tried).await;
            adapters.look().await;
        };
        tokio::select! {
            () = look => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
    }
}

struct Adapters<'a> {
    core: &'a Core,
}

impl Adapters<'_> {
    /// Loads adapters into external engines that report that they lack them. `tried`: when each
    /// adapter was last tried on each backend.
    async fn load(&self, tried: &mut HashMap<(BackendId, Arc<str>), Instant>) {
        tried.retain(|_, at| at.elapsed() < LOAD_INTERVAL);
        let (table, mut loads) = (self.core.flow.routing_table(), JoinSet::new());
        let view: Vec<_> = self.core.admission.view().into_iter().flat_map(|pool| pool.backends).collect();
        let is_external = |id: &BackendId| {
            let places = table
                .config
                .pools
                .iter()
                .zip(&table.pools)
                .flat_map(|(pool, route)| pool.backends.iter().zip(&route.backends));
            places.filter(|(_, other)| *other == id).any(|(backend, _)| matches!(backend.target, Target::Url(_)))
        };
        let all = self.core.learned.experiments.all();
        for Experiment { plan, .. } in all.iter().filter(|one| one.state.phase() != Phase::Stopped) {
            for arm in &plan.arms {
                let Some((name, id)) = &arm.model else { continue };
                let Some(folder) = table.config.models.get(id.index()).and_then(|model| model.adapter.clone()) else {
                    continue;
                };
                for backend in backends_of(arm, &table).into_iter().filter(is_external) {
                    let missing = self.core.admission.is_any_in_rotation(&[backend])
                        && self.core.reported.serves(backend, name) == Some(false);
                    let Some(seen) = view.iter().find(|seen| seen.id == backend).filter(|_| missing) else { continue };
                    if tried.insert((backend, Arc::clone(name)), Instant::now()).is_none() {
                        self.core.loading.lock().push((backend, Arc::clone(name)));
                        let (address, folder, name, backend) =
                            (Arc::clone(&seen.address), folder.clone(), Arc::clone(name), Arc::clone(&seen.name));
                        loads.spawn(async move {
                            match sluice_fleet::load_adapter(&address, &name, &folder).await {
                                Ok(()) => tracing::info!(backend = %backend, adapter = %name, "adapter loaded for an experiment"),
                                Err(why) => tracing::error!(backend = %backend, "{why}; tried again after {} s", LOAD_INTERVAL.as_secs()),
                            }
                        });
                    }
                }
            }
        }
        if !loads.is_empty() {
            loads.join_all().await;
            self.core.loading.lock().clear();
            self.core.probe_now.notify_one();
        }
    }

    async fn look(&self) {
        let models = self.core.learned.experiments.arm_models();
        if models.is_empty() {
            return;
        }
        let limit = self.core.config.load().health.probe_timeout;
        let (mut pages, mut asked) = (JoinSet::new(), HashSet::new());
        for pool in self.core.admission.view() {
            for backend in pool.backends {
                let served = self.core.reported.of(backend.id);
                let serves = models.iter().any(|model| served.iter().any(|name| **name == **model));
                // A backend of two pools is one engine, which is asked once.
                if serves && asked.insert(Arc::clone(&backend.address.authority)) {
                    let name = format!("{}/{}", pool.name, backend.name);
                    pages.spawn(async move { (name, sluice_fleet::scrape(&backend.address, limit).await) });
                }
            }
        }
        let seen = pages.join_all().await;
        let seen: Vec<_> = seen.into_iter().filter_map(|(name, page)| self.adapters_of(name, page?)).collect();
        self.core.learned.experiments.note_adapters(&seen);
    }

    /// The adapters on an engine's page; `None` for an engine without requests, whose page still
    /// shows the last ones.
    fn adapters_of(&self, backend: String, page: MetricsSnapshot) -> Option<EngineAdapters> {
        let adapters = page.adapters.filter(|_| page.running + page.waiting > 0.0)?;
        let config = self.core.config.load();
        let rank_of = |name: &str| {
            let model = config.model_named(name)?;
            sluice_fleet::adapter_rank(config.models[model.index()].adapter.as_deref()?)
        };
        let in_use = adapters.names.into_iter().map(|name| (name.clone(), rank_of(&name))).collect();
        let (host, rank) = self.core.fleet.adapter_limits(&backend);
        let defers = page.deferred.map(|deferred| deferred > 0.0);
        Some(EngineAdapters { backend, slots: adapters.slots, host, rank, in_use, defers })
    }
}
