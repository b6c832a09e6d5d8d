//! An amount of the capacity of one backend, by which several gateways divide it; `foreign.rs` has
//! the rules.
//!
//! Where there is no limit, the amount is [`UNLIMITED`], so that sums do not overflow.

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::capacity::{BackendLimits, CapacityUsage};

/// Stands for no limit. It is above every limit, but a sum of a few does not overflow.
const UNLIMITED: u64 = u64::MAX / 8;
const UNLIMITED_SLOTS: u32 = u32::MAX / 8;

/// An amount of the capacity of one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Sequences in flight.
    pub slots: u32,
    /// Outstanding prompt + output tokens.
    pub tokens: u64,
    /// Prompt tokens in prefill.
    pub prefill_tokens: u64,
    /// Prefill permits.
    pub permits: u32,
}

/// When shares that are not renewed end, and the clock for this.
#[derive(Clone, Copy, Debug)]
pub struct ShareEnd {
    /// From then on nothing is admitted.
    pub at: Instant,
    /// Reads the time.
    pub clock: fn() -> Instant,
}

impl Share {
    /// The amount where there is no limit.
    pub const NO_LIMIT: u64 = UNLIMITED;

    /// More than any limit.
    pub const ALL: Self =
        Self { slots: UNLIMITED_SLOTS, tokens: UNLIMITED, prefill_tokens: UNLIMITED, permits: UNLIMITED_SLOTS };

    pub(super) fn of(used: &CapacityUsage) -> Self {
        Self {
            slots: used.slots,
            tokens: used.tokens,
            prefill_tokens: used.prefill_tokens,
            permits: used.long_prefills,
        }
    }

    /// The limits as an amount; [`UNLIMITED`] where there is no limit.
    pub(super) fn of_limits(limits: &BackendLimits) -> Self {
        Self {
            slots: limits.slots,
            tokens: limits.tokens.unwrap_or(UNLIMITED),
            prefill_tokens: limits.prefill_tokens.unwrap_or(UNLIMITED),
            permits: limits.long_prefix.map_or(UNLIMITED_SLOTS, |long| long.slots),
        }
    }

    fn each(self, other: Self, slots: impl Fn(u32, u32) -> u32, tokens: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            slots: slots(self.slots, other.slots),
            tokens: tokens(self.tokens, other.tokens),
            prefill_tokens: tokens(self.prefill_tokens, other.prefill_tokens),
            permits: slots(self.permits, other.permits),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.each(other, u32::saturating_add, u64::saturating_add)
    }

    pub(super) fn minus(self, other: Self) -> Self {
        self.each(other, u32::saturating_sub, u64::saturating_sub)
    }

    /// An even part of each unit, rounded up.
    pub(super) fn divided_by(self, parts: u32) -> Self {
        self.each(self, |amount, _| amount.div_ceil(parts), |amount, _| amount.div_ceil(parts.into()))
    }

    pub(super) fn min(self, other: Self) -> Self {
        self.each(other, Ord::min, Ord::min)
    }

    pub(super) fn max(self, other: Self) -> Self {
        self.each(other, Ord::max, Ord::max)
    }
}
