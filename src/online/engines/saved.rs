//! State of the slow layer that survives a restart of the gateway.
//!
//! Fields of the JSON form are only added, with a default, so that a newer gateway reads an older
//! file.

use serde::{Deserialize, Serialize};

use super::change::{EngineChange, Stage};
use super::flags::EngineFlag;
use super::forecast::Trust;

/// State that survives a restart of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedEngines {
    pub(super) change: Option<SavedChange>,
    pub(super) trust: Trust,
    pub(super) numbers: u64,
    pub(super) failures: u32,
    /// Seconds of a restart; 0: unknown.
    pub(super) lasts: u64,
    /// Closed values, each with the seconds for which it stays closed.
    pub(super) closed: Vec<(SavedClosing, u64)>,
    #[serde(default)]
    pub(super) frozen: Option<String>,
    #[serde(default)]
    pub(super) spent: f64,
    #[serde(default)]
    pub(super) missed_before: f64,
    /// Restarts of the last hour, each by the seconds from it to the save.
    #[serde(default)]
    pub(super) restarts: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedChange {
    #[serde(flatten)]
    pub(super) change: EngineChange,
    pub(super) stage: Stage,
}

/// A value that failed, and the number of earlier failures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedClosing {
    pub(super) pool: String,
    pub(super) flag: EngineFlag,
    pub(super) to: f64,
    pub(super) failures: u32,
}
