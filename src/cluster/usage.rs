//! What a gateway knows of its own use when it writes: backend by backend, what runs, what waits, and what the engine says.
//!
//! The caller measures it between two plans; see the fields for what each must include.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::amounts::{Amounts, Limit};
#[cfg(doc)]
use crate::silence::{END_AGE, PAUSE, SURE_AGE};

/// By the name of the backend, which must be the same at all gateways.
pub type LocalUse = BTreeMap<String, Usage>;

/// One backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Its limit in this gateway's configuration.
    pub limit: Limit,
    /// In use now: everything that the engine may have of this gateway.
    pub used: Amounts,
    /// In use, and waiting for room here.
    pub wanted: Amounts,
    /// The largest request that waits, unit by unit.
    pub need: Amounts,
    /// The fewest sequences at any time since the last plan of which the engine was known to have them: their first token was
    /// seen at least [`SURE_AGE`] ago, not yet their end, and none of them waited for its client. 0 if this process did not run
    /// for [`PAUSE`] at some time since then, and for [`END_AGE`] after that: it has not seen yet what ended meanwhile.
    pub settled: u64,
    /// What the engine said since the last plan.
    pub page: Option<Page>,
}

/// What an engine says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// When it was asked, on the member's clock.
    pub asked: Duration,
    /// Sequences that it has, running and waiting.
    pub running: u64,
}
