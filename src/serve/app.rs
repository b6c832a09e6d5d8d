//! A running gateway: the core and the services.
//!
//! The arrows are references. Each service is built after the services that it uses.
//!
//! ```text
//!   Reloader --> ExperimentService ---.
//!      |   '---> Pods <--- ScalerService --> Core
//!      '-------> TunerService <-'----------^
//!                    FindingsService ------'
//! ```

use std::sync::Arc;

use crate::core::Core;
use crate::experiments::{Added, ExperimentService};
use crate::findings::FindingsService;
use crate::pods::Pods;
use crate::reload::Reloader;
use crate::scaler::ScalerService;
use crate::tuner::{TunerService, TunerState};
use sluice_gateway::pool::Admission;

/// The core and the services.
#[derive(Debug)]
pub struct App {
    /// The parts that all services share.
    pub core: Arc<Core>,
    /// Replaces the configuration.
    pub reloader: Arc<Reloader>,
    pub(crate) tuner: Arc<TunerService>,
    pub(crate) pods: Arc<Pods>,
    pub(crate) scaler: Arc<ScalerService>,
    pub(crate) experiments: Arc<ExperimentService>,
    pub(crate) findings: Arc<FindingsService>,
}

impl App {
    /// The services of a gateway. `added`: the experiments of the admin API.
    pub(crate) fn new(core: Arc<Core>, tuner: TunerState, added: Added) -> Arc<Self> {
        let (tuner, pods) = (Arc::new(TunerService::new(Arc::clone(&core), tuner)), Arc::<Pods>::default());
        let scaler = Arc::new(ScalerService::new(Arc::clone(&core), Arc::clone(&tuner), Arc::clone(&pods)));
        let experiments = Arc::new(ExperimentService::new(Arc::clone(&core), added));
        let used = (Arc::clone(&tuner), Arc::clone(&pods), Arc::clone(&experiments));
        let reloader = Arc::new(Reloader::new(Arc::clone(&core), used));
        let findings = Arc::new(FindingsService::new(Arc::clone(&core)));
        Arc::new(Self { core, reloader, tuner, pods, scaler, experiments, findings })
    }

    /// Pools, backends and leases.
    pub fn admission(&self) -> &Arc<Admission> {
        &self.core.admission
    }
}
