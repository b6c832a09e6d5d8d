//! A gateway's use of each backend when it writes.
//!
//! The caller measures it between two plans: requests that run, requests that wait, and the
//! engine's report. The fields define what each number includes.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::amounts::{Amounts, Limit};
#[cfg(doc)]
use crate::silence::{END_AGE, PAUSE, SURE_AGE};

/// Use by backend, whose name must be the same at all gateways.
pub type LocalUse = BTreeMap<String, Usage>;

/// Use of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The limit in this gateway's configuration.
    pub limit: Limit,
    /// In use now: everything that the engine may have from this gateway.
    pub used: Amounts,
    /// In use or waiting for room here.
    pub wanted: Amounts,
    /// The largest request that waits, by unit.
    pub need: Amounts,
    /// The fewest sequences at any time since the last plan that the engine had for sure. Such a
    /// sequence had a first token at least [`SURE_AGE`] ago, has not been seen to end, and does not
    /// wait for its client. 0 if this process paused for [`PAUSE`] since the last plan, or until
    /// [`END_AGE`] before it: sequences may have ended unseen.
    pub settled: u64,
    /// The latest report of the engine since the last plan.
    pub page: Option<Page>,
}

/// An engine's report of its own load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// When the engine was asked, on the member's clock.
    pub asked: Duration,
    /// Sequences at the engine, running and waiting.
    pub running: u64,
}
