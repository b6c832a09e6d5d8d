//! A bound on requests for a backend whose engine is on trial, because the flags were just changed.
//!
//! Such an engine gets copies of requests first. The load that it sustained with copies bounds the
//! requests that follow, so an engine that fails above some load fails with copies. The bound is
//! below the limits of the backend, and binds only requests. While it is closed (no slot), requests
//! neither use the backend nor displace copies, which may use the full limits once the requests
//! there have ended. A request that exceeds the bound by itself goes elsewhere.

use super::capacity::{BackendLimits, Need};

/// The most that requests may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialBound {
    /// Sequences in flight; 0: no request.
    pub slots: u32,
    /// Outstanding prompt + output tokens.
    pub tokens: u64,
}

impl TrialBound {
    pub(super) fn is_closed(self) -> bool {
        self.slots == 0
    }

    pub(super) fn fits_alone(self, need: &Need) -> bool {
        need.slots <= self.slots && need.tokens() <= self.tokens
    }

    pub(super) fn below(self, limits: BackendLimits) -> BackendLimits {
        let tokens = limits.tokens.map_or(self.tokens, |limit| limit.min(self.tokens));
        BackendLimits { slots: limits.slots.min(self.slots), tokens: Some(tokens), ..limits }
    }
}
