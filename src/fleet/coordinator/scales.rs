//! What [`scale`](super::scale) remembers of each pool between two looks.
//!
//! An engine that could not be drained is not tried again at once, and a reason to wait is logged once. Bounds: the pools that are
//! configured.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use crate::engine::lifecycle::RestartBlocked;

/// What is remembered of each pool between two looks.
#[derive(Debug, Default)]
pub(super) struct Scales(BTreeMap<String, PoolScale>);

/// What is remembered of one pool.
#[derive(Debug, Default)]
pub(super) struct PoolScale {
    /// No engine is stopped before.
    pub(super) not_before: Option<Instant>,
    /// Engines that are being stopped. One that serves again was not drained in time.
    pub(super) resting: BTreeSet<String>,
    /// Why none could be stopped, which is logged once.
    pub(super) why: Option<RestartBlocked>,
}

impl Scales {
    /// Of this pool.
    pub(super) fn pool(&mut self, name: &str) -> &mut PoolScale {
        self.0.entry(name.to_owned()).or_default()
    }

    /// Forgets pools that are not configured.
    pub(super) fn retain(&mut self, is_configured: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_configured(name));
    }
}
