//! Advances and saves experiments, and carries out the orders of operators.
//!
//! Ramps follow the calendar clock, because a ramp may begin at a date. Measurements are saved
//! every [`SAVE_INTERVAL`] and at the end, in the folder of the engines' journal (`fleet.state`),
//! and the next gateway goes on with them. A crash loses the last seconds.

mod adapters;
mod saved;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::core::Core;
use crate::saved_file::read_or_set_aside;
use sluice_admin::unsaved::UnsavedOrder;
use sluice_admin::{ExperimentError, Order};
use sluice_gateway::experiment::{Experiment, ExperimentReport, Experiments, Phase};

pub(crate) use saved::{Added, own_lines, restore as restore_added};

/// A second is enough: steps of a ramp take minutes or more.
const INTERVAL: Duration = Duration::from_secs(1);
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
const FILE: &str = "experiments.json";

/// Restores saved measurements. A file that cannot be read is renamed, and experiments begin anew.
pub(crate) fn restore(experiments: &Experiments, folder: &Path) {
    experiments.restore(read_or_set_aside(folder, FILE));
}

/// Restores saved measurements as [`restore`] does, in place of this gateway's own measurements.
pub(crate) fn restore_over(experiments: &Experiments, folder: &Path) {
    experiments.restore_over(read_or_set_aside(folder, FILE));
}

#[derive(Debug)]
pub(crate) struct ExperimentService {
    core: Arc<Core>,
    /// Experiments of the admin API; only reloads change them.
    pub(crate) added: Mutex<Added>,
}

impl ExperimentService {
    pub(crate) fn new(core: Arc<Core>, added: Added) -> Self {
        Self { core, added: Mutex::new(added) }
    }

    /// Starts the tasks. They run until `end` is true. Then the measurements are saved.
    pub(crate) fn start(self: &Arc<Self>, end: &watch::Receiver<bool>) -> [JoinHandle<()>; 2] {
        let folder = self.core.config.load().fleet.state.clone();
        [
            tokio::spawn(Arc::clone(self).keep(folder, end.clone())),
            tokio::spawn(adapters::keep_looking(Arc::clone(&self.core), end.clone())),
        ]
    }

    async fn keep(self: Arc<Self>, folder: PathBuf, mut end: watch::Receiver<bool>) {
        let mut saved = Instant::now();
        loop {
            let ending = tokio::select! {
                () = tokio::time::sleep(INTERVAL) => false,
                _ = end.wait_for(|ending| *ending) => true,
            };
            let due = ending || saved.elapsed() >= SAVE_INTERVAL;
            let (service, folder) = (Arc::clone(&self), folder.clone());
            let turn = tokio::task::spawn_blocking(move || {
                service.core.learned.experiments.advance(Timestamp::now());
                if due && let Err(error) = service.save(&folder) {
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

    /// Saves all measurements, also of experiments that do not fit the configuration now.
    fn save(&self, folder: &Path) -> std::io::Result<()> {
        let left_out: Vec<String> = self.added.lock().left_out().map(str::to_owned).collect();
        let saved = self.core.learned.experiments.save(|name| left_out.iter().any(|other| other == name));
        if saved.is_empty() || !self.core.fleet.lead().is_held() {
            return Ok(());
        }
        // This cannot fail, because there are no map keys.
        let bytes = serde_json::to_vec(&saved).unwrap_or_default();
        sluice_fleet::replace_state(folder, FILE, &bytes)
    }

    fn find(&self, name: &str) -> Result<Experiment, ExperimentError> {
        self.core.learned.experiments.find(name).ok_or_else(|| self.unknown(name))
    }

    pub(crate) fn active(&self) -> Vec<ExperimentReport> {
        self.core.learned.experiments.all().iter().map(|experiment| ExperimentReport::new(experiment, true)).collect()
    }

    /// Short reports, also of experiments that do not fit the configuration.
    pub(crate) fn reports(&self) -> Vec<ExperimentReport> {
        let mut all = self.active();
        all.extend(self.added.lock().left_out_reports());
        all
    }

    pub(crate) fn report(&self, name: &str) -> Result<ExperimentReport, ExperimentError> {
        match self.core.learned.experiments.find(name) {
            Some(experiment) => Ok(ExperimentReport::new(&experiment, false)),
            None => self.left_out(name).ok_or_else(|| self.unknown(name)),
        }
    }

    pub(crate) fn short_report(&self, name: &str) -> Result<ExperimentReport, ExperimentError> {
        Ok(ExperimentReport::new(&self.find(name)?, true))
    }

    fn left_out(&self, name: &str) -> Option<ExperimentReport> {
        self.added.lock().left_out_reports().find(|report| report.name == name)
    }

    pub(crate) fn unknown(&self, name: &str) -> ExperimentError {
        if let Some(report) = self.left_out(name) {
            return ExperimentError::NotActive { name: report.name, why: report.why.unwrap_or_default() };
        }
        let known: Vec<String> =
            self.core.learned.experiments.all().iter().map(|one| one.plan.name.to_string()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        ExperimentError::Unknown { name: name.to_owned(), known }
    }

    pub(crate) fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError> {
        let experiment = self.find(name)?;
        let phase = match order {
            Order::Stop => Phase::Stopped,
            Order::Start => match self.core.arm_that_is_not_ready(&experiment.plan) {
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
        let folder = self.core.config.load().fleet.state.clone();
        if let Err(error) = self.save(&folder) {
            return Err(UnsavedOrder { folder, reason: error.to_string() }.into());
        }
        Ok(ExperimentReport::new(&experiment, true))
    }
}
