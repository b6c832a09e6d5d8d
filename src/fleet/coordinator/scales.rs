//! State that [`scale`](super::scale) keeps of each pool between two calls.
//!
//! An engine that could not be drained is not tried again at once, and a reason to wait is logged
//! once. Bounds: the configured pools.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::engine::lifecycle::RestartBlocked;

#[derive(Debug, Default)]
pub(super) struct Scales(BTreeMap<String, PoolScale>);

#[derive(Debug, Default)]
pub(super) struct PoolScale {
    /// No engine is stopped before this time.
    pub(super) not_before: Option<Instant>,
    /// Engines that are being stopped. If one serves again, it was not drained in time.
    pub(super) resting: BTreeSet<String>,
    /// The last logged reason why no engine could be stopped.
    pub(super) why: Option<RestartBlocked>,
}

impl Scales {
    pub(super) fn pool(&mut self, name: &str) -> &mut PoolScale {
        self.0.entry(name.to_owned()).or_default()
    }

    pub(super) fn retain(&mut self, is_configured: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_configured(name));
    }
}
