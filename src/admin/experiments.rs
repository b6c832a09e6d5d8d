//! The routes of experiments: list, show, create, remove, start, stop, promote.
//!
//! | method and path below `/admin/experiments` | response |
//! |---|---|
//! | GET | all experiments ([`ExperimentReport`]), without quantiles and history |
//! | GET `/{name}` | the experiment with quantiles and history |
//! | PUT `/{name}` | the experiment, created or replaced |
//! | DELETE `/{name}` | the name of the removed experiment |
//! | POST `/{name}/start`, `/stop` | the report; requests in flight finish in their arm |
//! | POST `/{name}/promote/{arm}` | the report; all units of the experiment are in that arm |
//!
//! The body of PUT is a JSON object with the keys of `[[experiment]]`. PUT and DELETE do not work
//! on experiments of the configuration file.

use std::path::PathBuf;
use std::sync::Arc;

use http::StatusCode;
use serde_json::{Map, Value};

use super::unsaved::UnsavedOrder;
use sluice_gateway::experiment::{ExperimentReport, RATEABLE};

/// An operator's order about an experiment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Let requests take part; arms that were stopped begin again.
    Start,
    /// Let no requests take part.
    Stop,
    /// Put all units into this arm.
    Promote(String),
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExperimentError {
    /// There is no such experiment.
    #[error("there is no experiment '{name}'; there are: {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The experiment has no such arm.
    #[error("experiment '{name}' has no arm '{arm}'; its arms are: {known}")]
    UnknownArm {
        /// The experiment.
        name: String,
        /// The requested arm.
        arm: String,
        /// The arms that exist.
        known: String,
    },
    /// The experiment is in the configuration file.
    #[error(
        "experiment '{name}' is declared in the configuration file; change it there and reload (sluice experiment start and stop work)"
    )]
    Declared {
        /// The experiment.
        name: String,
    },
    /// The experiment is not valid.
    #[error("the experiment has problems; nothing was changed")]
    Invalid {
        /// The problems, one line each, with the key in the experiment.
        problems: Vec<String>,
    },
    /// An earlier gateway saved the experiment, and it does not fit the configuration.
    #[error(
        "experiment '{name}' is not active: {why}; change or remove it, or change the configuration and restart the gateway"
    )]
    NotActive {
        /// The experiment.
        name: String,
        /// The conflict with the configuration.
        why: String,
    },
    /// The change cannot be saved, and would be lost at the next restart.
    #[error("experiments cannot be saved in {} (fleet.state): {reason}; nothing was changed", folder.display())]
    NotSaved {
        /// The folder.
        folder: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The order is in force, but the gateway loses it at the next restart.
    #[error(transparent)]
    OrderNotSaved(#[from] UnsavedOrder),
    /// The gateway was started without a file.
    #[error(
        "the gateway was started from flags, and experiments are checked with the configuration file; start it with sluice serve FILE"
    )]
    NoFile,
    /// There is no answer to this request that can be rated.
    #[error(
        "no answer to a request with the id '{0}' can be rated: it is the x-request-id of the response to a request in an \
         experiment that runs, and of the latest {RATEABLE} of each experiment"
    )]
    UnknownRequest(String),
    /// No backend of an arm can serve a request now.
    #[error(
        "experiment.{name}.arm.{arm}: none of its backends is ready; start one of them first (sluice backend list)"
    )]
    NotReady {
        /// The experiment.
        name: String,
        /// The arm.
        arm: String,
    },
}

impl ExperimentError {
    pub(super) fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Unknown { .. } | Self::UnknownArm { .. } => (StatusCode::NOT_FOUND, "no_such_experiment"),
            Self::UnknownRequest(_) => (StatusCode::NOT_FOUND, "no_such_request"),
            Self::Declared { .. } => (StatusCode::CONFLICT, "declared_in_file"),
            Self::Invalid { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_experiment"),
            Self::NotActive { .. } => (StatusCode::CONFLICT, "not_active"),
            Self::NotSaved { .. } | Self::OrderNotSaved(_) => (StatusCode::INTERNAL_SERVER_ERROR, "not_saved"),
            Self::NoFile => (StatusCode::CONFLICT, "no_config_file"),
            Self::NotReady { .. } => (StatusCode::CONFLICT, "arm_not_ready"),
        }
    }

    pub(super) fn problems(&self) -> &[String] {
        if let Self::Invalid { problems } = self { problems } else { &[] }
    }
}

/// The experiments of a running gateway, for the admin API. Calls may block.
pub trait ExperimentControl {
    /// Short reports of all experiments.
    fn experiments(&self) -> Vec<ExperimentReport>;

    /// The full report of an experiment.
    fn experiment(&self, name: &str) -> Result<ExperimentReport, ExperimentError>;

    /// Adds a user's rating. Returns the label of the arm that answered.
    fn rate(&self, request_id: &str, good: bool) -> Result<Arc<str>, ExperimentError>;

    /// Creates an experiment, or replaces one that was created here.
    fn put_experiment(&self, name: &str, keys: Map<String, Value>) -> Result<ExperimentReport, ExperimentError>;

    /// Removes an experiment that `put_experiment` created.
    fn remove_experiment(&self, name: &str) -> Result<(), ExperimentError>;

    /// Carries out an order.
    fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError>;
}
