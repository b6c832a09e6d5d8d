//! The admin port's view of a running gateway: implements [`Control`](sluice_admin::Control).
//!
//! Every call reads the present state. Calls may block, because a reload reads files.

use std::borrow::Cow;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::app::App;
use crate::core::Source;
use crate::reload::{ReloadError, problem_lines};
use sluice_admin::named::find;
use sluice_admin::status::{ClassStatus, ClusterStatus, Diagnosis, KeyInFlightStatus, KeyStatus, ModelStatus};
use sluice_admin::{
    About, Access, BackendLogError, BackendRestartError, Control, ExperimentControl, ExperimentError, NoSuchBackend,
    Order, Status, TunerControl, TunerError, TunerOrder,
};
use sluice_config::{AddedExperiment, Config, ModelScope};
use sluice_core::base::BackendId;
use sluice_core::base::ModelId;
use sluice_core::engines::EngineKind;
use sluice_fleet::{ChangeStarted, LogLines, RestartRequest};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::pool::BackendView;
use sluice_gateway::telemetry::Telemetry;
use sluice_online::tuner::report::TunerReport;

impl Control for App {
    fn access(&self) -> Access {
        let config = self.core.config.load();
        Access { token: config.auth.admin_token.clone(), admin: config.admin.clone(), listen: config.server.admin }
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let config = match &self.core.source {
            Source::File { path, .. } => Some(path.display().to_string()),
            Source::Fixed => None,
        };
        let (last_reload, applied) = {
            let reloads = self.reloader.history.lock();
            (reloads.last.clone(), reloads.applied(now))
        };
        let about = About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: now.saturating_duration_since(self.core.started).as_secs_f64(),
            listen: self.core.config.load().server.listen.to_string(),
            config,
            leaving: self.core.flow.is_leaving(),
            shutting_down: self.core.flow.is_closing(),
            last_reload,
            applied,
        };
        let pools = self.core.admission.view();
        let mut status = Status::new(about, &pools, &self.core.fleet.views(), &self.core.telemetry, now);
        for (shown, pool) in status.pools.iter_mut().zip(&pools) {
            let members = pool.backends.iter().filter(|backend| !backend.removed);
            shown.kind = pool.backends.first().map_or_else(String::new, |one| one.address.engine.label().to_owned());
            shown.engines_differ = self.core.reported.differences(members.map(|backend| (&*backend.name, backend.id)));
            for (shown, backend) in shown.backends.iter_mut().zip(&pool.backends) {
                shown.models_unknown = self.core.reported.unreadable(backend.id);
                let found = self.core.kinds.of(backend.id);
                shown.engine_differs = found.and_then(|kind| sluice_fleet::mismatch(backend.address.engine, kind));
            }
        }
        let leader = self.core.leader.as_ref().map(|view| view.status());
        let cluster = self.core.cluster.as_ref().map(|view| ClusterStatus { leader, ..view.status() });
        let keys = self.core.learned.key_usage.tokens(now).into_iter().map(KeyStatus::from).collect();
        let classes = self.core.config.load().classes.iter().map(ClassStatus::from).collect();
        Status { findings: self.findings.all(), classes, kubernetes: self.pods.views(), cluster, keys, ..status }
    }

    fn another_leads(&self) -> Option<String> {
        self.core.leader.as_ref().and_then(|leader| leader.refusal())
    }

    fn diagnosis(&self) -> Diagnosis {
        let in_flight = self.core.learned.key_usage.in_flight().into_iter().map(KeyInFlightStatus::from).collect();
        Diagnosis { in_flight, ..self.findings.diagnosis() }
    }

    fn telemetry(&self) -> &Telemetry {
        &self.core.telemetry
    }

    fn models(&self) -> Vec<ModelStatus> {
        let (config, adapters) = (self.core.config.load(), self.core.reported.adapters());
        let ready: Vec<(String, Vec<String>)> = self
            .core
            .admission
            .view()
            .iter()
            .flat_map(|pool| pool.backends.iter().map(move |backend| (&pool.name, backend)))
            .filter(|(_, backend)| BackendView::in_rotation(backend))
            .map(|(pool, backend)| (pool.to_string(), self.core.reported.of(backend.id)))
            .collect();
        let mut names: Vec<String> = config.models.iter().map(|model| model.name.clone()).collect();
        names.extend(self.core.reported.names().into_iter().filter(|name| config.model_named(name).is_none()));
        let status = |name: String| {
            let id = config.model_named(&name);
            let declared = id.map(|id| &config.models[id.index()]);
            let pools =
                pools_of(&config, id, |pool| ready.iter().any(|(own, models)| own == pool && models.contains(&name)));
            let there = || ready.iter().filter(|(pool, _)| pools.contains(pool));
            ModelStatus {
                aliases: declared.map_or_else(Vec::new, |model| model.aliases.clone()),
                adapter: adapters.contains(&name) || declared.is_some_and(|model| model.adapter.is_some()),
                declared: declared.is_some(),
                serving: (there().filter(|(_, models)| models.contains(&name)).count(), there().count()),
                pools,
                name,
            }
        };
        names.into_iter().map(status).collect()
    }

    fn reload(&self) -> Result<Vec<String>, sluice_admin::ReloadError> {
        let changes = self.reloader.run().map_err(|error| match error {
            ReloadError::NoFile => sluice_admin::ReloadError::NoFile,
            refused => sluice_admin::ReloadError::Problems(problem_lines(&refused)),
        })?;
        Ok(changes.iter().map(ToString::to_string).collect())
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend> {
        let (id, engine) = self.engine(pool, backend)?;
        self.core.admission.set_draining(id, draining);
        if !draining {
            // This also starts an engine that waits for its next attempt.
            let enabled = Handle::current().block_on(self.core.fleet.enable(&engine));
            if let Err(refused) = enabled {
                tracing::warn!(pool, backend, "enabled, but its engine stays as it is: {refused}");
            }
        }
        Ok(())
    }

    fn engine_log(
        &self,
        pool: &str,
        backend: &str,
        after: Option<u64>,
        most: usize,
    ) -> Result<LogLines, BackendLogError> {
        let (_, engine) = self.engine(pool, backend)?;
        Ok(self.core.fleet.log(&engine, after, most)?)
    }

    fn engine_kind(&self, pool: &str, backend: &str) -> EngineKind {
        let view = self.core.admission.view();
        let backends = view.iter().filter(|own| *own.name == *pool).flat_map(|own| &own.backends);
        let mut found = backends.filter(|own| *own.name == *backend);
        found.next().map_or(EngineKind::default(), |own| own.address.engine)
    }

    fn restart(&self, pool: &str, backend: &str, ask: RestartRequest) -> Result<ChangeStarted, BackendRestartError> {
        let (_, name) = self.engine(pool, backend)?;
        Ok(Handle::current().block_on(self.core.fleet.restart(&name, ask))?)
    }
}

impl ExperimentControl for App {
    fn experiments(&self) -> Vec<ExperimentReport> {
        self.experiments.reports()
    }

    fn experiment(&self, name: &str) -> Result<ExperimentReport, ExperimentError> {
        self.experiments.report(name)
    }

    fn put_experiment(&self, name: &str, mut keys: Map<String, Value>) -> Result<ExperimentReport, ExperimentError> {
        if let Some(other) = keys.remove("name").filter(|other| *other != *name) {
            let problem = format!("name: {other} is not the name in the path, \"{name}\"; leave it out");
            return Err(ExperimentError::Invalid { problems: vec![problem] });
        }
        self.reloader.put_added(AddedExperiment { name: name.to_owned(), keys })?;
        self.experiments.short_report(name)
    }

    fn rate(&self, request_id: &str, good: bool) -> Result<Arc<str>, ExperimentError> {
        let rated = self.core.learned.experiments.rate(request_id, good);
        rated.ok_or_else(|| ExperimentError::UnknownRequest(request_id.to_owned()))
    }

    fn remove_experiment(&self, name: &str) -> Result<(), ExperimentError> {
        self.reloader.remove_added(name)
    }

    fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError> {
        self.experiments.order(name, order)
    }
}

impl TunerControl for App {
    fn tuner(&self) -> TunerReport {
        self.tuner.state.report()
    }

    fn order_tuner(&self, order: TunerOrder) -> Result<TunerReport, TunerError> {
        self.tuner.order(order)
    }
}

impl App {
    /// The backend with these names, and the name of the engine at its address.
    fn engine(&self, pool: &str, backend: &str) -> Result<(BackendId, String), NoSuchBackend> {
        let view = self.core.admission.view();
        let id = find(&view, pool, backend)?;
        let found = view.iter().flat_map(|pool| &pool.backends).find(|own| own.id == id);
        let name = found.map_or(Cow::Borrowed(backend), BackendView::engine_name);
        Ok((id, format!("{pool}/{name}")))
    }
}

/// The pools that serve a model. `reports`: whether a backend of a pool reports the model, which
/// decides for undeclared models.
fn pools_of(config: &Config, model: Option<ModelId>, reports: impl Fn(&str) -> bool) -> Vec<String> {
    let serves = |pool: &&sluice_config::Pool| match (&pool.models, model) {
        (ModelScope::All, Some(_)) => true,
        (ModelScope::All, None) => reports(&pool.name),
        (ModelScope::Only(ids), model) => model.is_some_and(|model| ids.contains(&model)),
    };
    config.pools.iter().filter(serves).map(|pool| pool.name.clone()).collect()
}
