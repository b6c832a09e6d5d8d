//! The tuner as the admin API shows it: plain numbers and texts, which the command line reads back.
//!
//! Times are in seconds, shares are fractions. What is not known is absent. Events have their times from the gateway's composition,
//! because the tuner itself knows no calendar.

use serde::{Deserialize, Serialize};

use crate::diagnosis::Diagnosis;
use crate::event::{Event, Proposal};
use crate::forecast::Realised;

/// An event with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimedEvent {
    /// RFC 3339.
    pub time: String,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// The tuner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunerReport {
    /// `off`, `advise`, `approve` or `apply`.
    pub mode: String,
    /// Why it makes no changes whatever its mode, if it was frozen or must not now.
    pub frozen: Option<String>,
    /// Pools that serve the same models are tuned together.
    pub groups: Vec<GroupReport>,
    /// Flags of engines.
    #[serde(default)]
    pub engines: EngineTuningReport,
    /// What it did last, the latest first.
    pub events: Vec<TimedEvent>,
}

impl TunerReport {
    /// The changes that it would make: of limits, then of engines.
    pub fn proposals(&self) -> impl Iterator<Item = &ProposalReport> {
        self.groups.iter().filter_map(|group| group.proposal.as_ref()).chain(&self.engines.proposal)
    }
}

/// Pools that serve the same models.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// Their names.
    pub pools: Vec<String>,
    /// What the tuner is doing now.
    pub doing: String,
    /// What it believes.
    pub why: String,
    /// Share of the requests that met their objectives in the last window; absent before the first one.
    pub attainment: Option<f64>,
    /// The share that should.
    pub target: f64,
    /// Limits that are not those of the configuration file.
    pub limits: Vec<LimitReport>,
    /// The change that it would make.
    pub proposal: Option<ProposalReport>,
    /// Changes that did not help.
    pub blocked: Vec<BlockedReport>,
    /// Why objectives are missed, with the evidence.
    pub diagnoses: Vec<Diagnosis>,
}

/// A limit that the tuner moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitReport {
    /// `pool.NAME.KEY`.
    pub key: String,
    /// Its value in the configuration file.
    pub configured: String,
    /// Its value now.
    pub in_force: String,
}

/// A change that the tuner would make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProposalReport {
    /// For `sluice tuner approve`.
    pub id: String,
    /// `pool.NAME.KEY`.
    pub key: String,
    /// Its value now.
    pub from: String,
    /// Its value after the change.
    pub to: String,
    /// Why it may help.
    pub why: String,
    /// Whether an operator has approved it: it begins within a second, or as soon as nothing else
    /// is tried.
    #[serde(default)]
    pub approved: bool,
}

impl ProposalReport {
    /// A proposal under the number by which an operator approves it.
    pub(crate) fn new(id: String, proposal: &Proposal, approved: bool) -> Self {
        let (from, to) = proposal.values.clone();
        Self { id, key: proposal.key.clone(), from, to, why: proposal.why.clone(), approved }
    }
}

/// A change that is not tried for a while.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockedReport {
    /// `pool.NAME.KEY`.
    pub key: String,
    /// Whether it was raised.
    pub up: bool,
    /// Why not.
    #[serde(default)]
    pub why: String,
    /// Seconds until it may be tried again.
    pub left: f64,
}

/// The part that changes flags of engines.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineTuningReport {
    /// What it is doing now.
    pub doing: String,
    /// What it believes, and why it makes no change.
    pub why: String,
    /// The change that it would make.
    pub proposal: Option<ProposalReport>,
    /// Changes that were measured, with what was forecast, the oldest first.
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
