//! The usage of one API key: requests, sequences and tokens in flight, and tokens over time.
//!
//! All configurations that have a key share the counters, so a reload neither resets nor releases
//! anything. Bounds: one set of counters per key, with the memory that `key_rate.rs` states.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::key_rate::{Ahead, Limit, TokenBudget, TokenLimits};
use super::key_share::{KeyAmounts, KeyLimits, KeyShare, KeyUnit};

/// The usage of one API key, shared by every configuration that has the key.
#[derive(Debug, Default)]
pub(super) struct KeyCounters {
    pub(super) in_flight: AtomicU32,
    pub(super) sequences: AtomicU64,
    pub(super) tokens: AtomicU64,
    /// How far ahead of the clock the next request is due, if the key has a rate of requests.
    pub(super) due: Mutex<Ahead>,
    /// The tokens that the key has used, if a rate limits them.
    pub(super) budget: Mutex<TokenBudget>,
    pub(super) configured: Mutex<(Arc<str>, KeyLimits)>,
    pub(super) share: KeyShare,
}

impl KeyCounters {
    /// The limits on tokens, each with the part that this gateway may use.
    pub(super) fn token_limits(&self, limits: &KeyLimits) -> TokenLimits {
        let limit = |unit: KeyUnit| {
            let whole = limits[unit as usize]?;
            Some(Limit { whole, part: self.share.of(unit, whole) })
        };
        TokenLimits { minute: limit(KeyUnit::TokenRate), day: limit(KeyUnit::DayTokens) }
    }

    /// Limits this gateway to `part` of the key's limits from now on. Time until now is settled at
    /// the rates of the previous part.
    pub(super) fn divide(&self, limits: &KeyLimits, part: &KeyAmounts, now: Instant) {
        if let Some(rate) = limits[KeyUnit::RequestRate as usize] {
            self.due.lock().settle(now, self.share.of(KeyUnit::RequestRate, rate), rate);
        }
        self.budget.lock().settle(self.token_limits(limits), now);
        self.share.set(part);
    }

    /// Tokens that the key is ahead of the limit per minute, and tokens used within the last day.
    pub(super) fn used_tokens(&self, limits: &KeyLimits, now: Instant) -> (u64, u64) {
        let limits = self.token_limits(limits);
        let mut budget = self.budget.lock();
        budget.settle(limits, now);
        budget.used(limits)
    }
}
