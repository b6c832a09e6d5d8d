//! Advances and saves experiments, and carries out the orders of operators.
//!
//! Ramps follow the machine's calendar clock, because a ramp may begin at a date. Measurements are
//! saved every [`SAVE_INTERVAL`] and at the end, in the folder of the engines' journal
//! (`fleet.state`), and the next gateway goes on with them. A crash loses the last seconds. One
//! task serves all experiments, and another one watches the engines that serve their adapters.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::app::App;
use super::saved_experiments::read_or_set_aside;
use crate::admin::unsaved::UnsavedOrder;
use crate::admin::{ExperimentControl, ExperimentError, Order};
use crate::base::BackendId;
use crate::experiment::{ArmPlan, EngineAdapters, Experiment, ExperimentPlan, ExperimentReport, Experiments, Phase};
use crate::fleet;
use crate::flow::RoutingTable;
use crate::vllm::metrics::MetricsSnapshot;
use sluice_config::{AddedExperiment, Target};

/// Pause between looks at the clock: steps of a ramp take minutes or more.
const INTERVAL: Duration = Duration::from_secs(1);
/// Pause between looks at the engines that serve adapters of experiments.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Pause between attempts to load an adapter into one engine.
const LOAD_INTERVAL: Duration = Duration::from_secs(30);
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
const FILE: &str = "experiments.json";

/// Restores the experiments that an earlier gateway saved in `folder`. A file that cannot be read
/// is renamed, and experiments begin anew.
pub(super) fn restore(experiments: &Experiments, folder: &Path) {
    experiments.restore(read_or_set_aside(folder, FILE));
}

/// As [`restore`], for a running gateway: saved measurements replace this gateway's own.
pub(super) fn restore_over(experiments: &Experiments, folder: &Path) {
    experiments.restore_over(read_or_set_aside(folder, FILE));
}

impl App {
    /// Advances experiments until `end` is true, and saves them in `folder`.
    pub(super) async fn keep_experiments(self: Arc<Self>, folder: PathBuf, mut end: watch::Receiver<bool>) {
        let mut saved = Instant::now();
        loop {
            let ending = tokio::select! {
                () = tokio::time::sleep(INTERVAL) => false,
                _ = end.wait_for(|ending| *ending) => true,
            };
            let due = ending || saved.elapsed() >= SAVE_INTERVAL;
            let (app, folder) = (Arc::clone(&self), folder.clone());
            let turn = tokio::task::spawn_blocking(move || {
                app.learned.experiments.advance(Timestamp::now());
                if due && let Err(error) = app.save_experiments(&folder) {
                    tracing::warn!(folder = %folder.display(), %error, "experiments cannot be saved; a restart of the gateway begins them anew");
                }
            });
            if let Err(error) = turn.await {
                tracing::error!(%error, "experiments could not be reviewed");
            }
            if ending {
                return;
            }
            if due {
                saved = Instant::now();
            }
        }
    }

    /// Saves measurements, also of experiments that do not fit the configuration now.
    fn save_experiments(&self, folder: &Path) -> std::io::Result<()> {
        let left_out: Vec<String> = self.added.lock().left_out().map(str::to_owned).collect();
        let saved = self.learned.experiments.save(|name| left_out.iter().any(|other| other == name));
        if saved.is_empty() || !self.fleet.lead().is_held() {
            return Ok(());
        }
        // Cannot fail: no map keys.
        let bytes = serde_json::to_vec(&saved).unwrap_or_default();
        fleet::replace_state(folder, FILE, &bytes)
    }

    /// Serves copies for shadow arms until `end` is true. Requests are copied from this call on.
    pub(super) fn keep_serving_copies(&self, mut end: watch::Receiver<bool>) -> impl Future<Output = ()> + use<> {
        let serving = Arc::clone(&self.flow).serve_copies();
        async move {
            tokio::select! {
                () = serving => {}
                _ = end.wait_for(|ending| *ending) => {}
            }
        }
    }

    /// Watches the engines that serve adapters of running experiments, until `end` is true.
    pub(super) async fn keep_looking_at_adapters(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let mut tried = HashMap::new();
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let look = async {
                self.load_adapters(&mut tried).await;
                self.look_at_adapters().await;
            };
            tokio::select! {
                () = look => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
        }
    }

    /// Loads adapters of arms into external engines that report that they do not serve them.
    /// `tried`: when each adapter was last tried on each backend.
    async fn load_adapters(&self, tried: &mut HashMap<(BackendId, Arc<str>), Instant>) {
        tried.retain(|_, at| at.elapsed() < LOAD_INTERVAL);
        let (table, mut loads) = (self.flow.routing_table(), JoinSet::new());
        let view: Vec<_> = self.admission.view().into_iter().flat_map(|pool| pool.backends).collect();
        let is_external = |id: &BackendId| {
            let places = table
                .config
                .pools
                .iter()
                .zip(&table.pools)
                .flat_map(|(pool, route)| pool.backends.iter().zip(&route.backends));
            places.filter(|(_, other)| *other == id).any(|(backend, _)| matches!(backend.target, Target::Url(_)))
        };
        let all = self.learned.experiments.all();
        for Experiment { plan, .. } in all.iter().filter(|one| one.state.phase() != Phase::Stopped) {
            for arm in &plan.arms {
                let Some((name, id)) = &arm.model else { continue };
                let Some(folder) = table.config.models.get(id.index()).and_then(|model| model.adapter.clone()) else {
                    continue;
                };
                for backend in backends_of(arm, &table).into_iter().filter(is_external) {
                    let missing = self.admission.is_any_in_rotation(&[backend])
                        && self.reported.serves(backend, name) == Some(false);
                    let Some(seen) = view.iter().find(|seen| seen.id == backend).filter(|_| missing) else { continue };
                    if tried.insert((backend, Arc::clone(name)), Instant::now()).is_none() {
                        self.loading.lock().push((backend, Arc::clone(name)));
                        let (address, folder, name, backend) =
                            (Arc::clone(&seen.address), folder.clone(), Arc::clone(name), Arc::clone(&seen.name));
                        loads.spawn(async move {
                            match fleet::load_adapter(&address, &name, &folder).await {
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
            self.loading.lock().clear();
            self.probe_now.notify_one();
        }
    }

    async fn look_at_adapters(&self) {
        let models = self.learned.experiments.arm_models();
        if models.is_empty() {
            return;
        }
        let limit = self.config.load().health.probe_timeout;
        let (mut pages, mut asked) = (JoinSet::new(), HashSet::new());
        for pool in self.admission.view() {
            for backend in pool.backends {
                let served = self.reported.of(backend.id);
                let serves = models.iter().any(|model| served.iter().any(|name| **name == **model));
                // A backend of two pools is one engine.
                if serves && asked.insert(Arc::clone(&backend.address.authority)) {
                    let name = format!("{}/{}", pool.name, backend.name);
                    pages.spawn(async move { (name, fleet::scrape(&backend.address, limit).await) });
                }
            }
        }
        let seen = pages.join_all().await;
        let seen: Vec<_> = seen.into_iter().filter_map(|(name, page)| self.adapters_of(name, page?)).collect();
        self.learned.experiments.note_adapters(&seen);
    }

    /// The adapters of an engine by its metrics page; `None` if it has none. An engine without
    /// requests is left out, because it keeps showing its last adapters.
    fn adapters_of(&self, backend: String, page: MetricsSnapshot) -> Option<EngineAdapters> {
        let adapters = page.adapters.filter(|_| page.running + page.waiting > 0.0)?;
        let config = self.config.load();
        let rank_of = |name: &str| {
            let model = config.model_named(name)?;
            fleet::adapter_rank(config.models[model.index()].adapter.as_deref()?)
        };
        let in_use = adapters.names.into_iter().map(|name| (name.clone(), rank_of(&name))).collect();
        let (host, rank) = self.fleet.adapter_limits(&backend);
        let defers = page.deferred.map(|deferred| deferred > 0.0);
        Some(EngineAdapters { backend, slots: adapters.slots, host, rank, in_use, defers })
    }

    fn find_experiment(&self, name: &str) -> Result<Experiment, ExperimentError> {
        self.learned.experiments.find(name).ok_or_else(|| self.unknown_experiment(name))
    }

    /// Short reports of the experiments in the configuration.
    pub(super) fn active_experiments(&self) -> Vec<ExperimentReport> {
        self.learned.experiments.all().iter().map(|experiment| ExperimentReport::new(experiment, true)).collect()
    }

    /// The report of an experiment that does not fit the configuration.
    fn left_out(&self, name: &str) -> Option<ExperimentReport> {
        self.added.lock().left_out_reports().find(|report| report.name == name)
    }

    pub(super) fn unknown_experiment(&self, name: &str) -> ExperimentError {
        if let Some(report) = self.left_out(name) {
            return ExperimentError::NotActive { name: report.name, why: report.why.unwrap_or_default() };
        }
        let known: Vec<String> = self.learned.experiments.all().iter().map(|one| one.plan.name.to_string()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        ExperimentError::Unknown { name: name.to_owned(), known }
    }

    /// For every arm with a model, notes whether a ready backend serves that model.
    pub(super) fn note_served_models(&self) {
        let table = self.flow.routing_table();
        for Experiment { plan, state } in self.learned.experiments.all() {
            for (number, arm) in plan.arms.iter().enumerate() {
                let Some((model, _)) = &arm.model else { continue };
                let mut ready = backends_of(arm, &table);
                ready.retain(|id| self.admission.is_any_in_rotation(&[*id]));
                // An adapter is reported before it is warm, so one that is being loaded does not
                // count.
                let loading = self.loading.lock();
                let is_loading = |id: BackendId| loading.iter().any(|(other, name)| *other == id && *name == *model);
                let serves = |id: &BackendId| self.reported.serves(*id, model) != Some(false) && !is_loading(*id);
                let served = (!ready.is_empty()).then(|| ready.iter().any(serves));
                if state.note_served(number, served) && state.phase() != Phase::Stopped {
                    match state.is_waiting(number) {
                        true => tracing::warn!(
                            "experiment {}: the arm {} waits: no ready backend serves the model {model}",
                            plan.name,
                            arm.name
                        ),
                        false => tracing::info!(
                            "experiment {}: requests take part in the arm {}: a ready backend serves the model {model}",
                            plan.name,
                            arm.name
                        ),
                    }
                }
            }
        }
    }

    /// An arm that has a pool or backends, none of which is ready.
    pub(super) fn arm_that_is_not_ready(&self, plan: &ExperimentPlan) -> Option<String> {
        let table = self.flow.routing_table();
        let not_ready = plan
            .arms
            .iter()
            .find(|arm| arm.pool.is_some() && !self.admission.is_any_in_rotation(&backends_of(arm, &table)));
        not_ready.map(|arm| arm.name.to_string())
    }
}

/// The backends that may serve the requests of an arm; none if the arm sets neither a pool nor a
/// model.
fn backends_of(arm: &ArmPlan, table: &RoutingTable) -> Vec<BackendId> {
    let of_pool = |pool: &usize| table.pools.get(*pool).map_or(&[][..], |pool| &pool.backends[..]);
    match (&arm.pool, &arm.model) {
        (Some(pool), _) => {
            let own = |position: &usize| arm.backends.is_empty() || arm.backends.contains(position);
            of_pool(pool).iter().enumerate().filter(|(at, _)| own(at)).map(|(_, id)| *id).collect()
        }
        (None, Some((model, _))) => {
            let pools = table.model(model).map_or(&[][..], |found| &found.route.pools[..]);
            pools.iter().flat_map(of_pool).copied().collect()
        }
        (None, None) => Vec::new(),
    }
}

impl ExperimentControl for App {
    fn experiments(&self) -> Vec<ExperimentReport> {
        let mut all = self.active_experiments();
        all.extend(self.added.lock().left_out_reports());
        all
    }

    fn experiment(&self, name: &str) -> Result<ExperimentReport, ExperimentError> {
        match self.learned.experiments.find(name) {
            Some(experiment) => Ok(ExperimentReport::new(&experiment, false)),
            None => self.left_out(name).ok_or_else(|| self.unknown_experiment(name)),
        }
    }

    fn put_experiment(&self, name: &str, mut keys: Map<String, Value>) -> Result<ExperimentReport, ExperimentError> {
        if let Some(other) = keys.remove("name").filter(|other| *other != *name) {
            let problem = format!("name: {other} is not the name in the path, \"{name}\"; leave it out");
            return Err(ExperimentError::Invalid { problems: vec![problem] });
        }
        self.put_added(AddedExperiment { name: name.to_owned(), keys })?;
        Ok(ExperimentReport::new(&self.find_experiment(name)?, true))
    }

    fn rate(&self, request_id: &str, good: bool) -> Result<Arc<str>, ExperimentError> {
        let rated = self.learned.experiments.rate(request_id, good);
        rated.ok_or_else(|| ExperimentError::UnknownRequest(request_id.to_owned()))
    }

    fn remove_experiment(&self, name: &str) -> Result<(), ExperimentError> {
        self.remove_added(name)
    }

    fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError> {
        let experiment = self.find_experiment(name)?;
        let phase = match order {
            Order::Stop => Phase::Stopped,
            Order::Start => match self.arm_that_is_not_ready(&experiment.plan) {
                Some(arm) => return Err(ExperimentError::NotReady { name: name.to_owned(), arm }),
                None => Phase::Running,
            },
            Order::Promote(arm) => {
                let arms = &experiment.plan.arms;
                let known = || arms.iter().map(|arm| &*arm.name).collect::<Vec<_>>().join(", ");
                let position = arms.iter().position(|one| *one.name == *arm).ok_or_else(|| {
                    ExperimentError::UnknownArm { name: name.to_owned(), arm: arm.clone(), known: known() }
                })?;
                Phase::Promoted(position)
            }
        };
        experiment.state.order(phase);
        let folder = self.config.load().fleet.state.clone();
        if let Err(error) = self.save_experiments(&folder) {
            return Err(UnsavedOrder { folder, reason: error.to_string() }.into());
        }
        Ok(ExperimentReport::new(&experiment, true))
    }
}
