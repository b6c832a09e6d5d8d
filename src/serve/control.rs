//! The admin port's view of a running gateway: implements [`Control`](crate::admin::Control).
//!
//! Every call reads the current state: the token and addresses of the configuration in force, and the state of the
//! pools. Calls may block, since a reload reads files.

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::app::{App, Source};
use super::reload::{ReloadError, problem_lines};
use crate::admin::status::find;
use crate::admin::{self, About, Access, BackendLogError, BackendRestartError, Control, NoSuchBackend, Status};
use crate::fleet::{ChangeStarted, LogLines, RestartRequest};

impl Control for App {
    fn access(&self) -> Access {
        let config = self.config.load();
        Access { token: config.auth.admin_token.clone(), admin: config.admin.clone(), listen: config.server.admin }
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
            refused => admin::ReloadError::Problems(problem_lines(&refused)),
        })?;
        Ok(changes.iter().map(ToString::to_string).collect())
    }

    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend> {
        let id = find(&self.admission.view(), pool, backend)?;
        self.admission.set_draining(id, draining);
        if !draining {
            // An engine that is on hold or waits for its next attempt is started now.
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
