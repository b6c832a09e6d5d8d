//! Experiments that the admin API creates, replaces and removes while the gateway runs.
//!
//! They join those of the configuration file before that is checked, so each change is a reload: the file is read again, and an error
//! changes nothing. They are saved in the folder of the engines' journal (`fleet.state`) and survive a restart of the gateway:
//! otherwise its users would leave their arms and what was measured would be lost. An experiment of the file is changed
//! only there: the file stays what an operator reads.

use std::path::Path;

use super::app::{App, Source};
use super::reload::{ReloadError, problem_lines};
use crate::admin::ExperimentError;
use crate::config::{AddedExperiment, Config, Origin};
use crate::experiment::ExperimentPlan;
use crate::fleet;

/// Where they are saved.
const FILE: &str = "added_experiments.json";

/// Adds those that an earlier gateway saved to a configuration that was read from `path`. One that does not fit the file any
/// more is reported and left out, so that the gateway starts.
pub(super) fn restore(config: &mut Config, path: &Path, sets: &[String]) -> Vec<AddedExperiment> {
    let folder = config.fleet.state.clone();
    let read = fleet::read_state(&folder, FILE).map_err(|error| error.to_string());
    let parsed = read.and_then(|bytes| match bytes {
        Some(bytes) => serde_json::from_slice::<Vec<AddedExperiment>>(&bytes).map_err(|error| error.to_string()),
        None => Ok(Vec::new()),
    });
    let saved = parsed.unwrap_or_else(|error| {
        tracing::error!(folder = %folder.display(), %error, "cannot read {FILE}; experiments of the admin API are left out");
        Vec::new()
    });
    let mut accepted = Vec::new();
    for experiment in saved {
        let name = experiment.name.clone();
        let candidate = [&accepted[..], &[experiment]].concat();
        match Config::load_with(path, sets, &candidate) {
            Ok(loaded) => (*config, accepted) = (loaded.config, candidate),
            Err(problems) => {
                tracing::error!(
                    "experiment {name} of the admin API does not fit the configuration and is left out: {problems}"
                );
            }
        }
    }
    accepted
}

impl App {
    /// Creates or replaces an experiment.
    pub(super) fn put_added(&self, experiment: AddedExperiment) -> Result<(), ExperimentError> {
        let _guard = self.reloading.lock();
        let name = experiment.name.clone();
        let mut added = self.added.lock().clone();
        added.retain(|other| other.name != name);
        self.check_not_declared(&name)?;
        // The last one: a conflict with another is a problem of this one.
        added.push(experiment);
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
        let before = added.len();
        added.retain(|other| other.name != name);
        if added.len() == before {
            self.check_not_declared(name)?;
            return Err(self.unknown_experiment(name));
        }
        self.set_added(added, |_| Ok(()))
    }

    /// Whether an experiment is not one of the file.
    fn check_not_declared(&self, name: &str) -> Result<(), ExperimentError> {
        let is_added = self.added.lock().iter().any(|other| other.name == name);
        let is_declared = self.config.load().experiments.iter().any(|declared| declared.name == name);
        if is_declared && !is_added { Err(ExperimentError::Declared { name: name.to_owned() }) } else { Ok(()) }
    }

    /// Reads the file again and applies it with other added experiments, if `check` has no objection. The caller holds the lock of
    /// reloads.
    fn set_added(
        &self,
        added: Vec<AddedExperiment>,
        check: impl FnOnce(&Config) -> Result<(), ExperimentError>,
    ) -> Result<(), ExperimentError> {
        let Source::File { path, sets } = &self.source else { return Err(ExperimentError::NoFile) };
        let refused = |error: ReloadError| ExperimentError::Invalid { problems: lines_of(&error) };
        let loaded = Config::load_with(path, sets, &added).map_err(|problems| refused(problems.into()))?;
        check(&loaded.config)?;
        let changes = self.apply(loaded.config).map_err(refused)?;
        changes.iter().for_each(|change| tracing::info!("applied with experiments of the admin API: {change}"));
        let folder = self.config.load().fleet.state.clone();
        let bytes = serde_json::to_vec(&added).unwrap_or_default();
        if let Err(error) = fleet::replace_state(&folder, FILE, &bytes) {
            tracing::warn!(folder = %folder.display(), %error, "experiments of the admin API cannot be saved; a restart of the gateway loses them");
        }
        *self.added.lock() = added;
        Ok(())
    }
}

/// Problems of the experiment at their keys in it, those of the file as for a reload.
fn lines_of(error: &ReloadError) -> Vec<String> {
    let ReloadError::Config(problems) = error else { return problem_lines(error) };
    let of_experiment = problems.errors.iter().filter(|problem| problem.origin() == Origin::Api);
    let lines: Vec<String> = of_experiment
        .map(|problem| match problem.path().split_once("].") {
            Some((_, key)) => format!("{key}: {}", problem.situation()),
            None => problem.situation().to_string(),
        })
        .collect();
    if lines.is_empty() { problem_lines(error) } else { lines }
}
