//! Experiments that the admin API creates, replaces and removes while the gateway runs.
//!
//! They join those of the configuration file before that is checked, so each change is a reload: the file is read again, and an error
//! changes nothing. They are saved in the folder of the engines' journal (`fleet.state`) and survive a restart of the gateway:
//! otherwise its users would leave their arms and what was measured would be lost. A change that cannot be saved is refused. An
//! experiment of the file is changed only there: the file stays what an operator reads.
//!
//! What cannot be restored at a start is kept. A saved experiment that does not fit the configuration any more stays saved and is
//! listed as [`NOT_ACTIVE`] with the reason; each start tries again. A file that cannot be read is set aside under another name.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::app::{App, Source};
use super::reload::{ReloadError, problem_lines};
use crate::admin::ExperimentError;
use crate::config::{AddedExperiment, Config, Origin};
use crate::experiment::report::NOT_ACTIVE;
use crate::experiment::{ExperimentPlan, ExperimentReport};
use crate::fleet;

/// Where they are saved.
const FILE: &str = "added_experiments.json";

/// The experiments of the admin API.
#[derive(Clone, Debug, Default)]
pub(crate) struct Added {
    /// Those that the configuration includes.
    pub(super) active: Vec<AddedExperiment>,
    /// Those that an earlier gateway saved and that do not fit the configuration; each with the reason.
    left_out: Vec<(AddedExperiment, String)>,
}

impl Added {
    /// The names of those that do not fit the configuration.
    pub(super) fn left_out(&self) -> impl Iterator<Item = &str> {
        self.left_out.iter().map(|(experiment, _)| &*experiment.name)
    }

    /// Those that do not fit the configuration, as they are listed.
    pub(super) fn left_out_reports(&self) -> impl Iterator<Item = ExperimentReport> {
        self.left_out.iter().map(|(experiment, why)| ExperimentReport {
            name: experiment.name.clone(),
            phase: NOT_ACTIVE.to_owned(),
            why: Some(why.clone()),
            ..ExperimentReport::default()
        })
    }

    /// Removes one. Returns whether there was one of that name.
    fn remove(&mut self, name: &str) -> bool {
        let before = self.active.len() + self.left_out.len();
        self.active.retain(|other| other.name != name);
        self.left_out.retain(|(other, _)| other.name != name);
        self.active.len() + self.left_out.len() < before
    }

    /// Replaces what is saved, or leaves it as it was.
    fn save(&self, folder: &Path) -> Result<(), ExperimentError> {
        let all: Vec<_> = self.left_out.iter().map(|(experiment, _)| experiment).chain(&self.active).collect();
        // Cannot fail: all keys are strings.
        let bytes = serde_json::to_vec(&all).unwrap_or_default();
        fleet::replace_state(folder, FILE, &bytes)
            .map_err(|error| ExperimentError::NotSaved { folder: folder.to_owned(), reason: error.to_string() })
    }
}

/// Adds those that an earlier gateway saved to a configuration that was read from `path`. One that does not fit the file any
/// more is reported and left out, so that the gateway starts.
pub(super) fn restore(config: &mut Config, path: &Path, sets: &[String]) -> Added {
    let saved: Vec<AddedExperiment> = read_or_set_aside(&config.fleet.state, FILE);
    let mut added = Added::default();
    for experiment in saved {
        let candidate = [&added.active[..], std::slice::from_ref(&experiment)].concat();
        match Config::load_with(path, sets, &candidate) {
            Ok(loaded) => (*config, added.active) = (loaded.config, candidate),
            Err(problems) => {
                let why = lines_of(&problems.into()).join("; ");
                tracing::error!(
                    "experiment {} of the admin API does not fit the configuration and is not active: {why}",
                    experiment.name
                );
                added.left_out.push((experiment, why));
            }
        }
    }
    added
}

/// Reads a file of the folder. One that cannot be read counts as empty and is set aside, which the log says.
pub(super) fn read_or_set_aside<T: DeserializeOwned + Default>(folder: &Path, name: &str) -> T {
    let read = fleet::read_state(folder, name).map_err(|error| error.to_string());
    let parsed = read.and_then(|bytes| match bytes {
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        None => Ok(T::default()),
    });
    parsed.unwrap_or_else(|why| {
        let (path, aside) = (folder.join(name), fleet::set_state_aside(folder, name));
        match aside {
            Ok(aside) => tracing::error!("{} cannot be read ({why}): kept as {aside}, and not used", path.display()),
            // Then it cannot be replaced either.
            Err(error) => tracing::error!("{} cannot be read ({why}) or renamed ({error})", path.display()),
        }
        T::default()
    })
}

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
