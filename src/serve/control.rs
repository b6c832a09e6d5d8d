//! What the admin port may ask of a running gateway.
//!
//! Everything is answered from what is in force now: the token, the configuration's addresses and admission's view; only
//! how the last reload went is kept, for those who look later. May block, as a reload reads files.

use jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{House, ReloadError, Source};
use crate::admin::status::{LastReload, find};
use crate::admin::{self, About, BackendRestartError, Control, NoSuchBackend, Status};
use crate::config::Secret;
use crate::config::diff::Change;
use crate::config::limits::MAX_PROBLEMS;
use crate::fleet::{ChangeStarted, RestartRequest};

impl House {
    /// Keeps how a reload went, for those who ask later.
    pub(super) fn remember(&self, result: &Result<Vec<Change>, ReloadError>) {
        let lines = match result {
            Ok(changes) => changes.iter().map(ToString::to_string).collect(),
            Err(error) => lines(error),
        };
        let time = format!("{:.0}", Timestamp::now());
        *self.last_reload.lock() = Some(LastReload { time, ok: result.is_ok(), lines });
    }
}

fn lines(error: &ReloadError) -> Vec<String> {
    match error {
        ReloadError::Config(problems) => {
            let source = &problems.source;
            problems.errors.iter().take(MAX_PROBLEMS).map(|problem| format!("{source}: {problem}")).collect()
        }
        ReloadError::Unusable(_) | ReloadError::NoFile => vec![error.to_string()],
    }
}

impl Control for House {
    fn admin_token(&self) -> Option<Secret> {
        self.config.load().auth.admin_token.clone()
    }

    fn metrics(&self) -> String {
        self.telemetry.page()
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let config = match &self.source {
            Source::File { path, .. } => Some(path.display().to_string()),
            Source::Fixed => None,
        };
        let about = About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: now.saturating_duration_since(self.started).as_secs_f64(),
            listen: self.config.load().server.listen.to_string(),
            config,
            shutting_down: self.flow.is_closing(),
            last_reload: self.last_reload.lock().clone(),
        };
        Status::new(about, &self.admission.view(), &self.fleet.views(), &self.telemetry, now)
    }

    fn reload(&self) -> Result<Vec<String>, admin::ReloadError> {
        let changes = Self::reload(self).map_err(|error| match error {
            ReloadError::NoFile => admin::ReloadError::NoFile,
            refused => admin::ReloadError::Problems(lines(&refused)),
        })?;
        Ok(changes.iter().map(ToString::to_string).collect())
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend> {
        let id = find(&self.admission.view(), pool, backend)?;
        self.admission.set_draining(id, draining);
        if !draining {
            // It may hold, or wait for its next attempt: whoever enables it wants it now.
            let enabled = Handle::current().block_on(self.fleet.enable(&format!("{pool}/{backend}")));
            if let Err(refused) = enabled {
                tracing::warn!(pool, backend, "enabled, but its engine stays as it is: {refused}");
            }
        }
        Ok(())
    }

    fn restart(&self, pool: &str, backend: &str, ask: RestartRequest) -> Result<ChangeStarted, BackendRestartError> {
        find(&self.admission.view(), pool, backend)?;
        let name = format!("{pool}/{backend}");
        Ok(Handle::current().block_on(self.fleet.restart(&name, ask))?)
    }
}
