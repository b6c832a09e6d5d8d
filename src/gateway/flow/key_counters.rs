//! The usage of one API key, at once and over time. It survives reloads.
//!
//! Counters are shared by every configuration that has the key, so a reload neither resets nor
//! releases anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::key_rate::{Ahead, Limit, TokenBudget, TokenLimits};
use super::key_share::{KeyAmounts, KeyLimits, KeyShare, KeyUnit};

/// See the header of this file.
#[derive(Debug, Default)]
pub(super) struct KeyCounters {
    pub(super) in_flight: AtomicU32,
    pub(super) sequences: AtomicU64,
    pub(super) tokens: AtomicU64,
    /// How far ahead of the clock the next request is due, if the key has a rate.
    pub(super) due: Mutex<Ahead>,
    /// The tokens that it has used, if they are limited.
    pub(super) budget: Mutex<TokenBudget>,
    /// Its name and limits in the configuration.
    pub(super) configured: Mutex<(Arc<str>, KeyLimits)>,
    pub(super) share: KeyShare,
}

impl KeyCounters {
    /// The limits on tokens, with the parts of them that may be used here.
    pub(super) fn token_limits(&self, limits: &KeyLimits) -> TokenLimits {
        let limit = |unit: KeyUnit| {
            let whole = limits[unit as usize]?;
            Some(Limit { whole, part: self.share.of(unit, whole) })
        };
        TokenLimits { minute: limit(KeyUnit::TokenRate), day: limit(KeyUnit::DayTokens) }
    }

    /// From now on this gateway uses at most `part` of the key's limits. Until now the rates of the
    /// part before were in force.
    pub(super) fn divide(&self, limits: &KeyLimits, part: &KeyAmounts, now: Instant) {
        if let Some(rate) = limits[KeyUnit::RequestRate as usize] {
            self.due.lock().settle(now, self.share.of(KeyUnit::RequestRate, rate), rate);
        }
        self.budget.lock().settle(self.token_limits(limits), now);
        self.share.set(part);
    }

    /// Tokens that the key is ahead of its limit for a minute, and tokens used within the last day.
    pub(super) fn used_tokens(&self, limits: &KeyLimits, now: Instant) -> (u64, u64) {
        let limits = self.token_limits(limits);
        let mut budget = self.budget.lock();
        budget.settle(limits, now);
        budget.used(limits)
    }
}
