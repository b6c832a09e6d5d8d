//! Permissions, proposals and events of the tuner: plain data for operators, journals and metrics.
//!
//! Names of kinds are labels of metrics and words in the journal, so none is renamed or removed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether the tuner may make changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acting {
    /// It only proposes changes.
    Proposes,
    /// It makes changes that an operator approves.
    WaitsForApproval,
    /// It makes changes.
    Acts,
}

/// A change that the tuner would make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// The number that an operator approves; unique while the gateway runs.
    pub id: u64,
    /// The limit or flag: `pool.NAME.KEY` or `pool.NAME.engine.FLAG`.
    pub key: String,
    /// The values before and after.
    pub values: (String, String),
    /// Why it may help.
    pub why: String,
}

/// An event, for the operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds on the caller's clock.
    pub at: f64,
    /// The kind.
    pub kind: EventKind,
    /// The limit or flag as in a [`Proposal`]; for other events, the pools or `engines`.
    pub key: String,
    /// The values before and after.
    pub values: (String, String),
    /// Why.
    pub why: String,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self { at, kind, key, why, .. }, (from, to)) = (self, &self.values);
        let values = if kind.is_change() { format!(" {from} -> {to}") } else { String::new() };
        write!(f, "{at:6.0} s {} {key}{values}: {why}", kind.word())
    }
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A change may help, but an operator must approve or make it.
    Proposed,
    /// A change was made.
    Tried,
    /// The change stays.
    Kept,
    /// The change was undone.
    Undone,
    /// The change was undone without a verdict.
    StoodBack,
    /// An operator has put a configured limit in force again.
    Reset,
    /// The canary has served copies and is compared next.
    Compared,
    /// The other engines get the change.
    Promoted,
    /// No more changes until an operator resumes the tuner.
    Frozen,
    /// A window of observation has ended; no values.
    Observed,
    /// Changes were simulated, and no change of engines began; no values.
    Forecast,
}

impl EventKind {
    /// All kinds, in order of declaration.
    pub const ALL: [Self; 11] = [
        Self::Proposed,
        Self::Tried,
        Self::Kept,
        Self::Undone,
        Self::StoodBack,
        Self::Reset,
        Self::Compared,
        Self::Promoted,
        Self::Frozen,
        Self::Observed,
        Self::Forecast,
    ];

    /// Whether operators see events of this kind; the journal has all kinds.
    pub fn is_change(self) -> bool {
        !matches!(self, Self::Observed | Self::Forecast)
    }

    /// The name in metrics and in the journal.
    pub fn word(self) -> &'static str {
        match self {
            Self::Proposed => "proposed",
            Self::Tried => "tried",
            Self::Kept => "kept",
            Self::Undone => "undone",
            Self::StoodBack => "stood_back",
            Self::Reset => "reset",
            Self::Compared => "compared",
            Self::Promoted => "promoted",
            Self::Frozen => "frozen",
            Self::Observed => "observed",
            Self::Forecast => "forecast",
        }
    }
}
