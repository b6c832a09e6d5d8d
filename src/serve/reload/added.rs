//! Experiments that the admin API creates, replaces and removes while the gateway runs.
//!
//! Each change is a reload with these experiments added, and an error changes nothing. The
//! experiments are saved in the folder of the engines' journal (`fleet.state`). Without them after
//! a restart, users would leave their arms, and measurements would be lost. So a change that cannot
//! be saved is refused. An experiment of the file can be changed only there.

use super::{ReloadError, Reloader, problem_lines};
use crate::core::Source;
use crate::experiments::{Added, own_lines, restore_added};
use sluice_admin::ExperimentError;
use sluice_config::{AddedExperiment, Config};
use sluice_gateway::experiment::ExperimentPlan;

impl Reloader {
    pub(crate) fn put_added(&self, experiment: AddedExperiment) -> Result<(), ExperimentError> {
        let _alone = self.core.alone();
        let name = experiment.name.clone();
        let mut added = self.experiments.added.lock().clone();
        added.remove(&name);
        self.check_not_declared(&name)?;
        // Added last, so that a conflict with another experiment is a problem of this one.
        added.active.push(experiment);
        self.set_added(added, |config| {
            let plan =
                ExperimentPlan::all(config).into_iter().find(|plan| *plan.name == *name).filter(|plan| plan.running);
            match plan.and_then(|plan| self.core.arm_that_is_not_ready(&plan)) {
                Some(arm) => Err(ExperimentError::NotReady { name: name.clone(), arm }),
                None => Ok(()),
            }
        })
    }

    pub(crate) fn remove_added(&self, name: &str) -> Result<(), ExperimentError> {
        let _alone = self.core.alone();
        let mut added = self.experiments.added.lock().clone();
        if !added.remove(name) {
            self.check_not_declared(name)?;
            return Err(self.experiments.unknown(name));
        }
        self.set_added(added, |_| Ok(()))
    }

    pub(crate) fn read_added(&self) -> Result<(), ReloadError> {
        let Source::File { path, sets } = &self.core.source else { return Ok(()) };
        let _alone = self.core.alone();
        let mut config = Config::load_with(path, sets, &[])?.config;
        let added = restore_added(&mut config, path, sets);
        if added != *self.experiments.added.lock() {
            self.apply(config)?;
            *self.experiments.added.lock() = added;
        }
        Ok(())
    }

    fn check_not_declared(&self, name: &str) -> Result<(), ExperimentError> {
        let is_added = self.experiments.added.lock().active.iter().any(|other| other.name == name);
        let is_declared = self.core.config.load().experiments.iter().any(|declared| declared.name == name);
        if is_declared && !is_added { Err(ExperimentError::Declared { name: name.to_owned() }) } else { Ok(()) }
    }

    /// Reads the file again and applies it with these experiments, if `check` agrees and the
    /// experiments can be saved. The caller holds [`Core::alone`](crate::core::Core::alone).
    fn set_added(
        &self,
        added: Added,
        check: impl FnOnce(&Config) -> Result<(), ExperimentError>,
    ) -> Result<(), ExperimentError> {
        let Source::File { path, sets } = &self.core.source else { return Err(ExperimentError::NoFile) };
        let refused = |error: ReloadError| ExperimentError::Invalid { problems: lines_of(&error) };
        let loaded = Config::load_with(path, sets, &added.active).map_err(|problems| refused(problems.into()))?;
        check(&loaded.config)?;
        let folder = self.core.config.load().fleet.state.clone();
        // A change that a restart would lose is refused.
        added.save(&folder)?;
        let changes = self.apply(loaded.config).map_err(|error| {
            if let Err(error) = self.experiments.added.lock().save(&folder) {
                tracing::error!("{error}; the next start of the gateway tries the refused change");
            }
            refused(error)
        })?;
        changes.iter().for_each(|change| tracing::info!("applied with experiments of the admin API: {change}"));
        *self.experiments.added.lock() = added;
        Ok(())
    }
}

/// Problems at keys of the experiment; without any, the problems of the file.
fn lines_of(error: &ReloadError) -> Vec<String> {
    let own = match error {
        ReloadError::Config(problems) => own_lines(problems),
        ReloadError::Unusable(_) | ReloadError::NoFile => Vec::new(),
    };
    if own.is_empty() { problem_lines(error) } else { own }
}
