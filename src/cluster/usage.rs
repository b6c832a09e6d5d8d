//! A gateway's use of each backend, measured between two plans.
//!
//! The caller counts this gateway's running and waiting requests, and reads the engine's report.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::amounts::{Amounts, Limit};
#[cfg(doc)]
use crate::silence::{END_AGE, PAUSE, SURE_AGE};

/// Use by backend. All gateways must give a backend the same name.
pub type LocalUse = BTreeMap<String, Usage>;

/// Use of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The limit in this gateway's configuration.
    pub limit: Limit,
    /// The most that requests of this gateway may use on the engine now.
    pub used: Amounts,
    /// Amounts in use, plus the amounts for which requests wait at this gateway.
    pub wanted: Amounts,
    /// By unit: the size of the largest waiting request.
    pub need: Amounts,
    /// The fewest sequences that were certainly on the engine at any moment since the last plan. A
    /// sequence is certain if its first token came at least [`SURE_AGE`] ago, no end was seen, and
    /// it does not wait for its client. 0 if this process paused for [`PAUSE`] since the last plan,
    /// or within [`END_AGE`] before it, because this process may then have missed ends.
    pub settled: u64,
    /// The engine's latest report since the last plan.
    pub page: Option<Page>,
}

/// An engine's report of its own load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// When the gateway asked the engine, on the member's clock.
    pub asked: Duration,
    /// Sequences at the engine, running and waiting.
    pub running: u64,
}
