//! One request of a key: its charges to the key's limits, and the settlement when it ends.
//!
//! - Requests, sequences and tokens at once count from admission until the engine has ended the
//!   request ([`InFlight::release`]).
//! - Tokens per minute and per day are charged when the request is admitted, with its estimate
//!   (`key_rate.rs` says which output is expected).
//! - While a stream runs, tokens beyond the charge are charged in steps, each to twice the tokens
//!   that came ([`InFlight::observe`]). So a lock is taken once for each doubling.
//! - When the request ends, the charge is corrected to the tokens that the request used
//!   ([`InFlight::settle`]). A request that is dropped without settlement keeps its charge.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::key_counters::KeyCounters;
use super::key_rate::{Exceeded, TokenLimits};
use super::key_share::{KeyLimits, KeyUnit};
use crate::pool::Need;
use sluice_core::openai::{KeyLimit, LimitUnit, TooLarge};

/// `Retry-After` when a limit on concurrency is exceeded: the smallest value that the header
/// allows.
pub(super) const SOON: Duration = Duration::from_secs(1);
/// The longest `Retry-After` for a limit of which this gateway has only a part: the part may grow
/// at any renewal.
const PART_GROWS: Duration = Duration::from_secs(60);

/// A limit of the key is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyLimitExceeded {
    /// The limit.
    pub limit: KeyLimit,
    /// When to try again.
    pub retry_after: Duration,
}

/// Why a request exceeds the limits of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyNeedError {
    /// Its need, together with the need of the other requests of the key, is above a limit.
    Exceeded(KeyLimitExceeded),
    /// Its need alone is above a limit, even if no other request is running.
    TooLarge(TooLarge),
}

/// The tokens that a request has used of its key's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsedTokens {
    /// Nothing is known beyond the tokens that were expected.
    AsCharged,
    /// This many.
    Counted {
        /// Prompt tokens.
        prompt: u64,
        /// Output tokens of all sequences.
        output: u64,
        /// The response is whole, so that the output of later requests can be expected from it.
        whole: bool,
    },
}

impl UsedTokens {
    /// No engine has worked for the request.
    pub const NOTHING: Self = Self::Counted { prompt: 0, output: 0, whole: false };
}

/// One request of a key in flight; counts until released or dropped.
#[derive(Debug)]
pub struct InFlight {
    limits: KeyLimits,
    counters: Arc<KeyCounters>,
    /// It counts against the limits on requests, sequences and tokens at once.
    counted: bool,
    sequences: u64,
    tokens: u64,
    charge: Charge,
}

/// The tokens that are charged to the limits on tokens.
#[derive(Clone, Copy, Debug)]
struct Charge {
    prompt: u64,
    output: u64,
    /// The output that the request permits, all sequences together.
    permitted: u64,
    /// Output tokens from which on [`InFlight::observe`] has something to do.
    step: u64,
    settled: bool,
}

impl Charge {
    const NONE: Self = Self { prompt: 0, output: 0, permitted: u64::MAX, step: u64::MAX, settled: true };
}

impl InFlight {
    /// A request that [`KeyCounters::in_flight`] counts already.
    pub(super) fn new(limits: KeyLimits, counters: Arc<KeyCounters>) -> Self {
        Self { limits, counters, counted: true, sequences: 0, tokens: 0, charge: Charge::NONE }
    }

    fn limit(&self, unit: KeyUnit) -> Option<u64> {
        self.limits[unit as usize]
    }

    /// Counts the sequences and tokens of the request against the key's limits. Called once.
    /// `permitted`: the most output tokens of all its sequences, if the request bounds them.
    ///
    /// # Errors
    /// The limit that the request exceeds, alone or together with the other requests of the key.
    pub fn take(&mut self, need: &Need, permitted: Option<u64>, now: Instant) -> Result<(), KeyNeedError> {
        let counters = Arc::clone(&self.counters);
        let (sequences, tokens) = (u64::from(need.slots), need.tokens());
        for (of, wanted, unit) in [
            (LimitUnit::Sequences, sequences, KeyUnit::Sequences),
            (LimitUnit::Tokens, tokens, KeyUnit::Tokens),
            (LimitUnit::Tokens, tokens, KeyUnit::TokenRate),
            (LimitUnit::Tokens, tokens, KeyUnit::DayTokens),
        ] {
            if let Some(limit) = self.limit(unit).filter(|limit| wanted > *limit) {
                return Err(KeyNeedError::TooLarge(TooLarge { unit: of, wanted, limit }));
            }
        }
        (self.sequences, self.tokens) = (sequences, tokens);
        let sequences_used = counters.sequences.fetch_add(sequences, Ordering::AcqRel).saturating_add(sequences);
        let tokens_used = counters.tokens.fetch_add(tokens, Ordering::AcqRel).saturating_add(tokens);
        let exceeded = |limit, retry_after| KeyNeedError::Exceeded(KeyLimitExceeded { limit, retry_after });
        let share = &counters.share;
        share.note(KeyUnit::Sequences, sequences, sequences_used);
        share.note(KeyUnit::Tokens, tokens, tokens_used);
        let above = |unit, used: u64| self.limit(unit).filter(|limit| used > share.of(unit, *limit));
        if let Some(limit) = above(KeyUnit::Sequences, sequences_used) {
            return Err(exceeded(KeyLimit::Sequences(limit), SOON));
        }
        if let Some(limit) = above(KeyUnit::Tokens, tokens_used) {
            return Err(exceeded(KeyLimit::Tokens(limit), SOON));
        }
        let step = if self.limit(KeyUnit::Tokens).is_some() { need.output_tokens } else { u64::MAX };
        self.charge = Charge { permitted: permitted.unwrap_or(u64::MAX), step, ..Charge::NONE };
        let limits = counters.token_limits(&self.limits);
        if !limits.is_none() {
            self.charge(need, limits, now).map_err(|found| match found {
                Exceeded::Minute(late) => exceeded(KeyLimit::TokenRate(self.whole(KeyUnit::TokenRate)), late),
                Exceeded::Day(late) => exceeded(KeyLimit::DayTokens(self.whole(KeyUnit::DayTokens)), late),
            })?;
        }
        Ok(())
    }

    fn whole(&self, unit: KeyUnit) -> u64 {
        self.limit(unit).unwrap_or_default()
    }

    /// Charges the estimate.
    fn charge(&mut self, need: &Need, limits: TokenLimits, now: Instant) -> Result<(), Exceeded> {
        let counters = Arc::clone(&self.counters);
        let mut budget = counters.budget.lock();
        budget.settle(limits, now);
        counters.share.note(KeyUnit::TokenRate, need.tokens(), 0);
        let in_window = budget.used(limits).1;
        counters.share.note(KeyUnit::DayTokens, need.tokens(), in_window.saturating_add(need.tokens()));
        let output = budget.charge(need, Some(self.charge.permitted).filter(|most| *most < u64::MAX), limits);
        budget.take(need.prompt_tokens.saturating_add(output), limits, now).map_err(|found| {
            // The gateway's part may grow soon, so a client should not stay away for the time that
            // the present part would take.
            let is_part = |limit: Option<super::key_rate::Limit>| limit.is_some_and(|limit| limit.part < limit.whole);
            match found {
                Exceeded::Minute(late) if is_part(limits.minute) => Exceeded::Minute(late.max(SOON)),
                Exceeded::Day(late) if is_part(limits.day) => Exceeded::Day(late.clamp(SOON, PART_GROWS)),
                whole => whole,
            }
        })?;
        let step = self.charge.step.min(output);
        self.charge = Charge { prompt: need.prompt_tokens, output, step, settled: false, ..self.charge };
        Ok(())
    }

    /// This many output tokens have come. Costs a comparison, unless they exceed the tokens that
    /// were charged.
    pub fn observe(&mut self, output: u64) {
        if output > self.charge.step {
            self.exceed(output, Instant::now());
        }
    }

    /// Charges twice the output that came.
    #[cold]
    fn exceed(&mut self, output: u64, now: Instant) {
        let ahead = output.saturating_mul(2).min(self.charge.permitted.max(output));
        if !self.charge.settled && output > self.charge.output {
            let limits = self.counters.token_limits(&self.limits);
            let mut budget = self.counters.budget.lock();
            budget.settle(limits, now);
            budget.correct(self.charge.output, ahead, limits);
            self.charge.output = ahead;
        }
        let held = self.charge.prompt.saturating_add(output);
        if self.counted && held > self.tokens {
            self.counters.tokens.fetch_add(held - self.tokens, Ordering::AcqRel);
            self.tokens = held;
        }
        self.charge.step = ahead;
    }

    /// The request no longer counts against the limits on requests, sequences and tokens at once:
    /// its engine has ended it. Idempotent.
    pub fn release(&mut self) {
        if std::mem::replace(&mut self.counted, false) {
            self.counters.sequences.fetch_sub(self.sequences, Ordering::AcqRel);
            self.counters.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
            self.counters.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Corrects the charge to the tokens that the request has used. Idempotent: the first call
    /// counts.
    pub fn settle(&mut self, used: UsedTokens, now: Instant) {
        if std::mem::replace(&mut self.charge.settled, true) {
            return;
        }
        let UsedTokens::Counted { prompt, output, whole } = used else { return };
        let limits = self.counters.token_limits(&self.limits);
        let charged = self.charge.prompt.saturating_add(self.charge.output);
        let mut budget = self.counters.budget.lock();
        budget.settle(limits, now);
        budget.correct(charged, prompt.saturating_add(output), limits);
        if whole && output > 0 {
            budget.learn(output / self.sequences.max(1));
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.release();
    }
}
