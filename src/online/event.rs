//! What the controller may do, what it would do, and what it did: plain data for operators, journals and metrics.
//!
//! Names of kinds are a contract: they are labels of metrics and words in the journal, and are only ever added.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the controller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acting {
    /// Propose changes.
    Proposes,
    /// Make those that an operator approves.
    WaitsForApproval,
    /// Make them.
    Acts,
}

/// A change that it would make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// What an operator approves; unique while the gateway runs.
    pub id: u64,
    /// The limit: `pool.NAME.KEY`.
    pub key: String,
    /// Its value before and after.
    pub values: (String, String),
    /// Why it may help.
    pub why: String,
}

/// What the controller did, for the operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When, from the start of the controller, seconds.
    pub at: f64,
    /// What.
    pub kind: EventKind,
    /// The limit: `pool.NAME.KEY`.
    pub key: String,
    /// Its value before and after.
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

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A change may help, and the tuner may not make it by itself.
    Proposed,
    /// A change was made.
    Tried,
    /// It stays.
    Kept,
    /// It was undone.
    Undone,
    /// It was undone without a verdict, because something else changed.
    StoodBack,
    /// An operator has put a limit of the configuration in force again.
    Reset,
    /// The engine that was restarted with a change is compared with one that was not.
    Compared,
    /// It is better, and the other engines get the change.
    Promoted,
    /// The tuner makes no more changes until an operator resumes it.
    Frozen,
    /// A window of observation has ended; the values are empty.
    Observed,
    /// Changes were simulated: of limits, or of engines, of which none was begun; the values are empty.
    Forecast,
}

impl EventKind {
    /// Every one, in order of declaration.
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

    /// Whether something was done, or would be: what operators are shown. The others are for the journal.
    pub fn is_change(self) -> bool {
        !matches!(self, Self::Observed | Self::Forecast)
    }

    /// Its name in metrics and in the journal.
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
