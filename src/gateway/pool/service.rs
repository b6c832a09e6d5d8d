//! Whether a backend is in service, as set from outside: by the operator, by the process that runs
//! the engine, and by the configuration.
//!
//! These decisions are independent: none of them lifts another. Health (`health.rs`) is separate.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Whether a backend may get work, as set by the process that runs the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cordon {
    /// Health decides.
    #[default]
    Open,
    /// No new requests; requests in flight finish. The backend returns, so requests without another
    /// backend may wait for it.
    Draining,
    /// The engine is starting. Requests may wait for it.
    Starting,
    /// The engine does not run and is not about to start. No request waits for it.
    Down,
    /// The engine was stopped for lack of demand. A request waits for it only if none of the
    /// request's pools has an engine in rotation and the home pool holds requests until one is
    /// started.
    Idle,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Service {
    /// Taken out of rotation by the operator.
    pub(super) draining: bool,
    /// No longer configured: the slot in the table is free once the last request here ends.
    pub(super) removed: bool,
    /// The cordon as set at this gateway.
    pub(super) own_cordon: Cordon,
    /// Another gateway runs the engine, and drains or starts it.
    pub(super) closed: bool,
    pub(super) start_takes: Option<Duration>,
    /// When the starting engine is expected to be ready.
    pub(super) ready_at: Option<Instant>,
}

impl Service {
    pub(super) fn set_cordon(&mut self, cordon: Cordon) {
        self.own_cordon = cordon;
        if cordon != Cordon::Starting {
            self.ready_at = None;
        }
    }

    /// The decision of the process that runs the engine, here or at another gateway.
    pub(super) fn cordon(&self) -> Cordon {
        if self.closed && self.own_cordon == Cordon::Open { Cordon::Draining } else { self.own_cordon }
    }

    /// Whether the backend is configured and not drained by the operator. The engine may be away.
    pub(super) fn is_wanted(&self) -> bool {
        !self.draining && !self.removed
    }

    /// Whether the backend only finishes running requests.
    pub(super) fn is_leaving(&self) -> bool {
        !self.is_wanted() || self.cordon() == Cordon::Draining
    }

    /// Whether the backend would get work if it were healthy.
    pub(super) fn is_open(&self) -> bool {
        self.is_wanted() && self.cordon() == Cordon::Open
    }
}
