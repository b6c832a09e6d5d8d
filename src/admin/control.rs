//! The [`Control`] trait: the operations of a running gateway that the admin API needs.
//!
//! `sluice-serve` implements it, and tests of this folder have a fake. Calls may block.

use super::access::Access;
use super::error::{BackendLogError, BackendRestartError, NoSuchBackend, ReloadError};
use super::experiments::ExperimentControl;
use super::status::{Diagnosis, ModelStatus, Status};
use super::tuner::TunerControl;
use sluice_core::engines::EngineKind;
use sluice_fleet::{ChangeStarted, LogLines, RestartRequest};
use sluice_gateway::telemetry::Telemetry;

/// The operations of the admin API, on a thread that may block.
pub trait Control: ExperimentControl + TunerControl + Send + Sync + 'static {
    /// The access rules of the configuration in force.
    fn access(&self) -> Access;

    /// The response to `/admin/status`.
    fn status(&self) -> Status;

    /// Why this gateway may not change engines, experiments or the tuner: another leads, or none
    /// does.
    fn another_leads(&self) -> Option<String> {
        None
    }

    /// Counts and records of finished requests.
    fn telemetry(&self) -> &Telemetry;

    /// The findings, and the last minute by key and engine.
    fn diagnosis(&self) -> Diagnosis;

    /// The models that clients may ask for, and the backends that serve them.
    fn models(&self) -> Vec<ModelStatus>;

    /// Reloads the configuration. Returns the changes, one line each.
    fn reload(&self) -> Result<Vec<String>, ReloadError>;

    /// Takes a backend out of rotation, or puts it back. Running requests finish.
    fn set_draining(&self, pool: &str, backend: &str, draining: bool) -> Result<(), NoSuchBackend>;

    /// Log lines of an engine that the gateway runs, from number `after` on; `None`: the last
    /// lines.
    fn engine_log(
        &self,
        pool: &str,
        backend: &str,
        after: Option<u64>,
        most: usize,
    ) -> Result<LogLines, BackendLogError>;

    /// The kind of engine of a backend. For a backend that does not exist, the default kind.
    fn engine_kind(&self, pool: &str, backend: &str) -> EngineKind;

    /// Restarts an engine that the gateway runs. Returns the number of the change once it has
    /// started.
    fn restart(&self, pool: &str, backend: &str, request: RestartRequest)
    -> Result<ChangeStarted, BackendRestartError>;
}
