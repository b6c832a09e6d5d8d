//! A bound on what requests may use of a backend whose engine is on trial, because its flags were just changed.
//!
//! Such an engine gets copies of requests first. What they have shown that it sustains bounds the requests that follow, so that
//! an engine which fails above some load fails with copies and not with requests. The bound is below the limits of the backend
//! and is one for requests only. While it is closed (no slot), requests neither use the backend nor displace copies there, and
//! copies may use all of the limits, once the requests that run there have ended.
//!
//! A request that exceeds the bound by itself is served by other backends.

use super::capacity::{BackendLimits, Need};

/// What requests may use at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialBound {
    /// Sequences in flight. 0: no request.
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
