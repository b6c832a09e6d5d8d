//! What the admin API needs of a running gateway: the [`Control`] trait.
//!
//! The gateway implements it in [`serve`](crate::serve), the tests of this folder with a fake. Calls may block.

use super::access::Access;
use super::error::{BackendLogError, BackendRestartError, NoSuchBackend, ReloadError};
use super::experiments::ExperimentControl;
use super::status::{ModelStatus, Status};
use super::tuner::TunerControl;
use crate::fleet::{ChangeStarted, LogLines, RestartRequest};
use crate::telemetry::Telemetry;

/// The operations of the admin API. Called on a thread that may block.
pub trait Control: ExperimentControl + TunerControl + Send + Sync + 'static {
    /// Who may use the port, by the configuration in force.
    fn access(&self) -> Access;

    /// The response to `/admin/status`.
    fn status(&self) -> Status;

    /// Why this gateway may not change engines, experiments and what the tuner does: another one leads, or none does.
    fn another_leads(&self) -> Option<String> {
        None
    }

    /// What is known of finished requests.
    fn telemetry(&self) -> &Telemetry;

    /// What clients may ask for, and how much of it is served.
    fn models(&self) -> Vec<ModelStatus>;

    /// Reads the configuration again and applies it. Returns the changes, one line each.
    fn reload(&self) -> Result<Vec<String>, ReloadError>;

    /// Takes a backend out of rotation or back in; running requests finish.
    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend>;

    /// Lines of the log of an engine that the gateway runs, from number `after` on, or the last ones.
    fn engine_log(
        &self,
        pool: &str,
        backend: &str,
        after: Option<u64>,
        most: usize,
    ) -> Result<LogLines, BackendLogError>;

    /// Restarts an engine that the gateway runs. Returns the number of the change once it has started.
    fn restart(&self, pool: &str, backend: &str, request: RestartRequest)
    -> Result<ChangeStarted, BackendRestartError>;
}
