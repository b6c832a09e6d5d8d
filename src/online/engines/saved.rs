//! State of the slow layer that survives a restart of the gateway.
//!
//! Plain data with a JSON form. Fields are only added, with a default, so a newer gateway reads the
//! file of an older one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engines::change::EngineChange;
use crate::engines::flags::EngineFlag;
use crate::engines::forecast::Trust;

/// State that survives a restart of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedEngines {
    pub(crate) change: Option<EngineChange>,
    pub(crate) trust: Trust,
    pub(crate) numbers: u64,
    pub(crate) failures: u32,
    /// Seconds of a restart; 0: unknown.
    pub(crate) lasts: u64,
    pub(crate) closed: Vec<(Closed, u64)>,
    /// Why the tuner froze itself.
    #[serde(default)]
    pub(crate) frozen: Option<String>,
    /// Misses caused by changes.
    #[serde(default)]
    pub(crate) spent: f64,
    /// Share of requests that missed before the change under way.
    #[serde(default)]
    pub(crate) missed_before: f64,
    /// The restarts of the last hour, in seconds before the save.
    #[serde(default)]
    pub(crate) restarts: Vec<u64>,
}

/// A value that failed, and until when it is not tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Closed {
    pub(crate) pool: String,
    pub(crate) flag: EngineFlag,
    pub(crate) to: f64,
    #[serde(skip)]
    pub(crate) until: Duration,
    pub(crate) failures: u32,
}
