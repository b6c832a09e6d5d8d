//! The routes of experiments: list, show, start, stop, promote.
//!
//! | method and path | response |
//! |---|---|
//! | GET `/admin/experiments` | all experiments ([`ExperimentReport`]), without quantiles and history |
//! | GET `/admin/experiments/{name}` | one of them, whole |
//! | POST `/admin/experiments/{name}/start`, `/stop` | its phase; requests that are in flight finish in their arm |
//! | POST `/admin/experiments/{name}/promote/{arm}` | the same: all units of the experiment are in that arm |

use super::restart_query::decode;
use crate::experiment::ExperimentReport;

/// What an operator wants of an experiment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Let requests take part; arms that were stopped begin again.
    Start,
    /// Let none take part.
    Stop,
    /// Put all units into this arm.
    Promote(String),
}

/// A path below `/admin/experiments`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ExperimentRoute {
    List,
    Show(String),
    Order(String, Order),
}

impl ExperimentRoute {
    pub(super) fn of(path: &str) -> Option<Self> {
        let rest = path.strip_prefix("/admin/experiments")?;
        let Some(rest) = rest.strip_prefix('/') else { return rest.is_empty().then_some(Self::List) };
        let parts: Vec<String> = rest.split('/').map(decode).collect::<Option<_>>()?;
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        Some(match parts[..] {
            [name] => Self::Show(name.to_owned()),
            [name, "start"] => Self::Order(name.to_owned(), Order::Start),
            [name, "stop"] => Self::Order(name.to_owned(), Order::Stop),
            [name, "promote", arm] => Self::Order(name.to_owned(), Order::Promote(arm.to_owned())),
            _ => return None,
        })
    }

    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Order(..))
    }
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
        /// Its arms.
        known: String,
    },
    /// An arm could not serve a request now.
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
    /// Whether what it names does not exist.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown { .. } | Self::UnknownArm { .. })
    }
}

/// The experiments of a running gateway, for the admin API. Calls may block.
pub trait ExperimentControl {
    /// All experiments, short.
    fn experiments(&self) -> Vec<ExperimentReport>;

    /// One experiment, whole.
    fn experiment(&self, name: &str) -> Result<ExperimentReport, ExperimentError>;

    /// Carries out an order.
    fn order(&self, name: &str, order: Order) -> Result<ExperimentReport, ExperimentError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_experiments_are_distinguished() {
        let of = ExperimentRoute::of;
        assert_eq!(of("/admin/experiments"), Some(ExperimentRoute::List));
        assert_eq!(of("/admin/experiments/a%2Fb"), Some(ExperimentRoute::Show("a/b".to_owned())));
        assert_eq!(of("/admin/experiments/a/stop"), Some(ExperimentRoute::Order("a".to_owned(), Order::Stop)));
        let promote = Order::Promote("b".to_owned());
        assert_eq!(of("/admin/experiments/a/promote/b"), Some(ExperimentRoute::Order("a".to_owned(), promote)));
        for path in
            ["/admin/experimentsx", "/admin/experiments/", "/admin/experiments/a/pause", "/admin/experiments/a/promote"]
        {
            assert_eq!(of(path), None, "{path}");
        }
    }
}
