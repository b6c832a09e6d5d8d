//! The experiments of the admin API, saved in the folder of the engines' journal, and their
//! restoration at a start.
//!
//! An experiment that cannot be restored is kept: if it no longer fits the configuration, it stays
//! saved and is listed as [`NOT_ACTIVE`] with the reason, and each start tries again. A file that
//! cannot be read is renamed and kept.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::admin::ExperimentError;
use crate::experiment::ExperimentReport;
use crate::experiment::report::NOT_ACTIVE;
use crate::fleet;
use sluice_config::{AddedExperiment, Config, Origin, Problems};

const FILE: &str = "added_experiments.json";

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Added {
    /// Experiments that the configuration includes.
    pub(super) active: Vec<AddedExperiment>,
    /// Saved experiments that do not fit the configuration, each with the reason.
    left_out: Vec<(AddedExperiment, String)>,
}

impl Added {
    pub(super) fn left_out(&self) -> impl Iterator<Item = &str> {
        self.left_out.iter().map(|(experiment, _)| &*experiment.name)
    }

    /// List entries of the experiments that do not fit the configuration.
    pub(super) fn left_out_reports(&self) -> impl Iterator<Item = ExperimentReport> {
        self.left_out.iter().map(|(experiment, why)| ExperimentReport {
            name: experiment.name.clone(),
            phase: NOT_ACTIVE.to_owned(),
            why: Some(why.clone()),
            ..ExperimentReport::default()
        })
    }

    /// Removes an experiment. Returns whether it existed.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let before = self.active.len() + self.left_out.len();
        self.active.retain(|other| other.name != name);
        self.left_out.retain(|(other, _)| other.name != name);
        self.active.len() + self.left_out.len() < before
    }

    /// Replaces the saved experiments; if that fails, they stay as they were.
    pub(super) fn save(&self, folder: &Path) -> Result<(), ExperimentError> {
        let all: Vec<_> = self.left_out.iter().map(|(experiment, _)| experiment).chain(&self.active).collect();
        // Cannot fail: all keys are strings.
        let bytes = serde_json::to_vec(&all).unwrap_or_default();
        fleet::replace_state(folder, FILE, &bytes)
            .map_err(|error| ExperimentError::NotSaved { folder: folder.to_owned(), reason: error.to_string() })
    }
}

/// Adds the saved experiments to a configuration that was read from `path`. An experiment that no
/// longer fits is reported and left out, so that the gateway starts.
pub(super) fn restore(config: &mut Config, path: &Path, sets: &[String]) -> Added {
    let saved: Vec<AddedExperiment> = read_or_set_aside(&config.fleet.state, FILE);
    let mut added = Added::default();
    for experiment in saved {
        let candidate = [&added.active[..], std::slice::from_ref(&experiment)].concat();
        match Config::load_with(path, sets, &candidate) {
            Ok(loaded) => (*config, added.active) = (loaded.config, candidate),
            Err(problems) => {
                let why = own_lines(&problems).join("; ");
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

/// Reads a file of the folder. A file that cannot be read counts as empty and is renamed; the log
/// says so.
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
            // Then the file cannot be replaced either.
            Err(error) => tracing::error!("{} cannot be read ({why}) or renamed ({error})", path.display()),
        }
        T::default()
    })
}

/// The problems of the experiments of the admin API, at their keys.
pub(super) fn own_lines(problems: &Problems) -> Vec<String> {
    let of_experiment = problems.errors.iter().filter(|problem| problem.origin() == Origin::Api);
    let line = |problem: &sluice_config::Problem| match problem.path().split_once("].") {
        Some((_, key)) => format!("{key}: {}", problem.situation()),
        None => problem.situation().to_string(),
    };
    of_experiment.map(line).collect()
}
