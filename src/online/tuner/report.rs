//! The tuner's report in the admin API, which the command line reads back.
//!
//! Times are in seconds, shares are fractions, unknown values are absent. The gateway adds calendar
//! times to events.

use serde::{Deserialize, Serialize};

use crate::engines::forecast::Realised;
use crate::event::{Event, Proposal};
use crate::observe::diagnosis::Diagnosis;

/// An event with a calendar time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedEvent {
    /// Time in RFC 3339.
    pub time: String,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

/// The tuner's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunerReport {
    /// `off`, `advise`, `approve` or `apply`.
    pub mode: String,
    /// Why the tuner is frozen, or hindered from changes; `None`: it is neither.
    pub frozen: Option<String>,
    /// Groups of pools that serve the same models and are tuned together.
    pub groups: Vec<GroupReport>,
    /// Tuning of engine flags.
    #[serde(default)]
    pub engines: EngineTuningReport,
    /// Recent events, the latest first.
    pub events: Vec<TimedEvent>,
}

impl TunerReport {
    /// The proposed changes: of limits, then of engines.
    pub fn proposals(&self) -> impl Iterator<Item = &ProposalReport> {
        self.groups.iter().filter_map(|group| group.proposal.as_ref()).chain(&self.engines.proposal)
    }
}

/// A group of pools.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// The names of the pools.
    pub pools: Vec<String>,
    /// The present activity.
    pub doing: String,
    /// The tuner's last conclusion about the group.
    pub why: String,
    /// Share of the requests that met their objectives in the last judged window, if any.
    pub attainment: Option<f64>,
    /// The share of the requests that should meet their objectives.
    pub target: f64,
    /// Limits that differ from the configuration file.
    pub limits: Vec<LimitReport>,
    /// The proposed change.
    pub proposal: Option<ProposalReport>,
    /// Changes that are not tried for a while.
    pub blocked: Vec<BlockedReport>,
    /// Why objectives are missed, with the evidence.
    pub diagnoses: Vec<Diagnosis>,
}

/// A limit that differs from the configuration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitReport {
    /// `pool.NAME.KEY`.
    pub key: String,
    /// The value in the configuration file.
    pub configured: String,
    /// The value in force.
    pub in_force: String,
}

/// A proposed change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProposalReport {
    /// For `sluice tuner approve`.
    pub id: String,
    /// `pool.NAME.KEY`, or `pool.NAME.engine.FLAG`.
    pub key: String,
    /// The present value.
    pub from: String,
    /// The proposed value.
    pub to: String,
    /// Why it may help.
    pub why: String,
    /// Whether an operator has approved it. An approved change begins within a second, or as soon
    /// as nothing else is on trial.
    #[serde(default)]
    pub approved: bool,
}

impl ProposalReport {
    pub(crate) fn new(id: String, proposal: &Proposal, approved: bool) -> Self {
        let (from, to) = proposal.values.clone();
        Self { id, key: proposal.key.clone(), from, to, why: proposal.why.clone(), approved }
    }
}

/// A change not tried for a while.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockedReport {
    /// `pool.NAME.KEY`.
    pub key: String,
    /// Whether it would raise the limit.
    pub up: bool,
    /// Why it is not tried.
    #[serde(default)]
    pub why: String,
    /// Seconds until it may be tried again.
    pub left: f64,
}

/// The tuning of engine flags.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineTuningReport {
    /// The present activity.
    pub doing: String,
    /// The last conclusion, and why no change is made.
    pub why: String,
    /// The proposed change.
    pub proposal: Option<ProposalReport>,
    /// Measured changes with forecasts, the oldest first.
    pub changes: Vec<Realised>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_are_those_of_limits_and_those_of_engines() {
        let proposal = |id: &str| {
            let (id, [key, from, to, why]) = (id.to_owned(), Default::default());
            Some(ProposalReport { id, key, from, to, why, approved: false })
        };
        let group = |proposal| GroupReport { proposal, ..GroupReport::default() };
        let engines = EngineTuningReport { proposal: proposal("e3"), ..EngineTuningReport::default() };
        let groups = vec![group(proposal("1.2")), group(None), group(proposal("3.1"))];
        let report = TunerReport { groups, engines, ..TunerReport::default() };
        let ids: Vec<_> = report.proposals().map(|proposal| &*proposal.id).collect();
        assert_eq!(ids, ["1.2", "3.1", "e3"]);
    }
}
