//! Experiments that the admin API creates, replaces and removes while the gateway runs.
//!
//! They join those of the configuration file before that is checked, so each change is a reload: the file is read again, and an error
//! changes nothing. They are saved in the folder of the engines' journal (`fleet.state`) and survive a restart of the gateway:
//! otherwise its users would leave their arms and what was measured would be lost. A change that cannot be saved is refused. An
//! experiment of the file is changed only there: the file stays what an operator reads.

use super::app::{App, Source};
use super::reload::{ReloadError, problem_lines};
use super::saved_experiments::{Added, own_lines};
use crate::admin::ExperimentError;
use crate::config::{AddedExperiment, Config};
use crate::experiment::ExperimentPlan;

impl App {
    /// Creates or replaces an experiment.
    pub(super) fn put_added(&self, experiment: AddedExperiment) -> Result<(), ExperimentError> {
        let _guard = self.reloading.lock();
        let name = experiment.name.clone();
        let mut added = self.added.lock().clone();
        added.remove(&name);
        self.check_not_declared(&name)?;
        // The last one: a conflict with another is a problem of this one.
        added.active.push(experiment);
        self.set_added(added, |config| {
            let plan =
                ExperimentPlan::all(config).into_iter().find(|plan| *plan.name == *name).filter(|plan| plan.running);
            match plan.and_then(|plan| self.arm_that_is_not_ready(&plan)) {
                Some(arm) => Err(ExperimentError::NotReady { name: name.clone(), arm }),
                None => Ok(()),
            }
        })
    }

    /// Removes an experiment.
    pub(super) fn remove_added(&self, name: &str) -> Result<(), ExperimentError> {
        let _guard = self.reloading.lock();
        let mut added = self.added.lock().clone();
        if !added.remove(name) {
            self.check_not_declared(name)?;
            return Err(self.unknown_experiment(name));
        }
        self.set_added(added, |_| Ok(()))
    }

    /// Whether an experiment is not one of the file.
    fn check_not_declared(&self, name: &str) -> Result<(), ExperimentError> {
        let is_added = self.added.lock().active.iter().any(|other| other.name == name);
        let is_declared = self.config.load().experiments.iter().any(|declared| declared.name == name);
        if is_declared && !is_added { Err(ExperimentError::Declared { name: name.to_owned() }) } else { Ok(()) }
    }

    /// Reads the file again and applies it with other added experiments, if `check` has no objection and they can be saved. The
    /// caller holds the lock of reloads.
    fn set_added(
        &self,
        added: Added,
        check: impl FnOnce(&Config) -> Result<(), ExperimentError>,
    ) -> Result<(), ExperimentError> {
        let Source::File { path, sets } = &self.source else { return Err(ExperimentError::NoFile) };
        let refused = |error: ReloadError| ExperimentError::Invalid { problems: lines_of(&error) };
        let loaded = Config::load_with(path, sets, &added.active).map_err(|problems| refused(problems.into()))?;
        check(&loaded.config)?;
        let folder = self.config.load().fleet.state.clone();
        // Before it takes effect: a change that a restart would lose is refused.
        added.save(&folder)?;
        let changes = self.apply(loaded.config).map_err(|error| {
            if let Err(error) = self.added.lock().save(&folder) {
                tracing::error!("{error}; the next start of the gateway tries the refused change");
            }
            refused(error)
        })?;
        changes.iter().for_each(|change| tracing::info!("applied with experiments of the admin API: {change}"));
        *self.added.lock() = added;
        Ok(())
    }
}

/// Problems of the experiment at their keys in it, those of the file as for a reload.
fn lines_of(error: &ReloadError) -> Vec<String> {
    let own = match error {
        ReloadError::Config(problems) => own_lines(problems),
        ReloadError::Unusable(_) | ReloadError::NoFile => Vec::new(),
    };
    if own.is_empty() { problem_lines(error) } else { own }
}
