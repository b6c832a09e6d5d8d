//! What of the slow layer survives a restart of the gateway: the change under way, what earlier ones have shown, and what failed.
//!
//! Plain data with a JSON form. Fields are only ever added, with a default: a newer gateway reads the file of an older one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::change::EngineChange;
use crate::flags::EngineFlag;
use crate::forecast::Trust;

/// What survives a restart of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedEngines {
    pub(crate) change: Option<EngineChange>,
    pub(crate) trust: Trust,
    pub(crate) numbers: u64,
    pub(crate) failures: u32,
    /// Seconds for which a restart lasts; 0: not known.
    pub(crate) lasts: u64,
    pub(crate) closed: Vec<(Closed, u64)>,
    /// Why it froze by itself.
    #[serde(default)]
    pub(crate) frozen: Option<String>,
    /// Misses that changes have caused.
    #[serde(default)]
    pub(crate) spent: f64,
    /// The share of requests that missed before the change under way.
    #[serde(default)]
    pub(crate) missed_before: f64,
    /// The restarts of the last hour: how many seconds ago.
    #[serde(default)]
    pub(crate) restarts: Vec<u64>,
}

/// A value that failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Closed {
    pub(crate) pool: String,
    pub(crate) flag: EngineFlag,
    pub(crate) to: f64,
    #[serde(skip)]
    pub(crate) until: Duration,
    pub(crate) failures: u32,
}
