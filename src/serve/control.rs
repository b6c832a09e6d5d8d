//! The admin port's view of a running gateway: implements [`Control`](crate::admin::Control).
//!
//! Every call reads the current state: the token and addresses of the configuration in force, and
//! the state of the pools. Calls may block, because a reload reads files.

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::app::{App, Source};
use super::reload::{ReloadError, problem_lines};
use crate::admin::status::{ClusterStatus, Diagnosis, KeyStatus, ModelStatus, find};
use crate::admin::{self, About, Access, BackendLogError, BackendRestartError, Control, NoSuchBackend, Status};
use crate::base::ModelId;
use crate::fleet::{ChangeStarted, LogLines, RestartRequest};
use crate::pool::BackendView;
use crate::telemetry::Telemetry;
use sluice_config::{Config, ModelScope};

impl Control for App {
    fn access(&self) -> Access {
        let config = self.config.load();
        Access { token: config.auth.admin_token.clone(), admin: config.admin.clone(), listen: config.server.admin }
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let config = match &self.source {
            Source::File { path, .. } => Some(path.display().to_string()),
            Source::Fixed => None,
        };
        let (last_reload, applied) = {
            let reloads = self.reloads.lock();
            (reloads.last.clone(), reloads.applied(now))
        };
        let about = About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: now.saturating_duration_since(self.started).as_secs_f64(),
            listen: self.config.load().server.listen.to_string(),
            config,
            leaving: self.flow.is_leaving(),
            shutting_down: self.flow.is_closing(),
            last_reload,
            applied,
        };
        let pools = self.admission.view();
        let mut status = Status::new(about, &pools, &self.fleet.views(), &self.telemetry, now);
        for (shown, pool) in status.pools.iter_mut().zip(&pools) {
            let members = pool.backends.iter().filter(|backend| !backend.removed);
            shown.engines_differ = self.reported.differences(members.map(|backend| (&*backend.name, backend.id)));
            for (shown, backend) in shown.backends.iter_mut().zip(&pool.backends) {
                shown.models_unknown = self.reported.unreadable(backend.id);
            }
        }
        let leader = self.leader.as_ref().map(|view| view.status());
        let cluster = self.cluster.as_ref().map(|view| ClusterStatus { leader, ..view.status() });
        let keys = self.learned.key_usage.tokens(now).into_iter().map(KeyStatus::from).collect();
        Status { findings: self.findings(), kubernetes: self.pods.views(), cluster, keys, ..status }
    }

    fn another_leads(&self) -> Option<String> {
        self.leader.as_ref().and_then(|leader| leader.refusal())
    }

    fn diagnosis(&self) -> Diagnosis {
        let (keys, engines) = self.last_minute();
        Diagnosis { findings: self.findings(), keys, engines }
    }

    fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    fn models(&self) -> Vec<ModelStatus> {
        let (config, adapters) = (self.config.load(), self.reported.adapters());
        let ready: Vec<(String, Vec<String>)> = self
            .admission
            .view()
            .iter()
            .flat_map(|pool| pool.backends.iter().map(move |backend| (&pool.name, backend)))
            .filter(|(_, backend)| BackendView::in_rotation(backend))
            .map(|(pool, backend)| (pool.to_string(), self.reported.of(backend.id)))
            .collect();
        let mut names: Vec<String> = config.models.iter().map(|model| model.name.clone()).collect();
        names.extend(self.reported.names().into_iter().filter(|name| config.model_named(name).is_none()));
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

    fn reload(&self) -> Result<Vec<String>, admin::ReloadError> {
        let changes = Self::reload(self).map_err(|error| match error {
            ReloadError::NoFile => admin::ReloadError::NoFile,
            refused => admin::ReloadError::Problems(problem_lines(&refused)),
        })?;
        Ok(changes.iter().map(ToString::to_string).collect())
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend> {
        let id = find(&self.admission.view(), pool, backend)?;
        self.admission.set_draining(id, draining);
        if !draining {
            // Starts an engine that is on hold, or that waits for the next attempt.
            let enabled = Handle::current().block_on(self.fleet.enable(&format!("{pool}/{backend}")));
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
        find(&self.admission.view(), pool, backend)?;
        Ok(self.fleet.log(&format!("{pool}/{backend}"), after, most)?)
    }

    fn restart(&self, pool: &str, backend: &str, ask: RestartRequest) -> Result<ChangeStarted, BackendRestartError> {
        find(&self.admission.view(), pool, backend)?;
        let name = format!("{pool}/{backend}");
        Ok(Handle::current().block_on(self.fleet.restart(&name, ask))?)
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
