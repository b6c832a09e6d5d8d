//! The saved experiments of the admin API, and their restoration at a start.
//!
//! An experiment that no longer fits the configuration stays saved and is listed as [`NOT_ACTIVE`]
//! with the reason.

use std::path::Path;

use crate::saved_file::read_or_set_aside;
use sluice_admin::ExperimentError;
use sluice_config::{AddedExperiment, Config, Origin, Problems};
use sluice_gateway::experiment::ExperimentReport;
use sluice_gateway::experiment::report::NOT_ACTIVE;

const FILE: &str = "added_experiments.json";

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Added {
    pub(crate) active: Vec<AddedExperiment>,
    left_out: Vec<(AddedExperiment, String)>,
}

impl Added {
    pub(crate) fn left_out(&self) -> impl Iterator<Item = &str> {
        self.left_out.iter().map(|(experiment, _)| &*experiment.name)
    }

    pub(crate) fn left_out_reports(&self) -> impl Iterator<Item = ExperimentReport> {
        self.left_out.iter().map(|(experiment, why)| ExperimentReport {
            name: experiment.name.clone(),
            phase: NOT_ACTIVE.to_owned(),
            why: Some(why.clone()),
            ..ExperimentReport::default()
        })
    }

    /// Removes an experiment. Returns whether it existed.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let before = self.active.len() + self.left_out.len();
        self.active.retain(|other| other.name != name);
        self.left_out.retain(|(other, _)| other.name != name);
        self.active.len() + self.left_out.len() < before
    }

    /// Saves the experiments. If that fails, the earlier file stays.
    pub(crate) fn save(&self, folder: &Path) -> Result<(), ExperimentError> {
        let all: Vec<_> = self.left_out.iter().map(|(experiment, _)| experiment).chain(&self.active).collect();
        // This cannot fail, because all keys are strings.
        let bytes = serde_json::to_vec(&all).unwrap_or_default();
        sluice_fleet::replace_state(folder, FILE, &bytes)
            .map_err(|error| ExperimentError::NotSaved { folder: folder.to_owned(), reason: error.to_string() })
    }
}

/// Adds the saved experiments to a configuration read from `path`. An experiment that no longer
/// fits is reported and left out, so that the gateway starts.
pub(crate) fn restore(config: &mut Config, path: &Path, sets: &[String]) -> Added {
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

/// The problems of the added experiments, each with the key.
pub(crate) fn own_lines(problems: &Problems) -> Vec<String> {
    let of_experiment = problems.errors.iter().filter(|problem| problem.origin() == Origin::Api);
    let line = |problem: &sluice_config::Problem| match problem.path().split_once("].") {
        Some((_, key)) => format!("{key}: {}", problem.situation()),
        None => problem.situation().to_string(),
    };
    of_experiment.map(line).collect()
}
