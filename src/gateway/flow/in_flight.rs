//! One request of a key in flight: the charges to the key's limits, and their settlement when the
//! request ends.
//!
//! - Requests, sequences and tokens in flight count from admission until the engine has ended the
//!   request ([`InFlight::release`]).
//! - Tokens per minute and per day are charged when the request is admitted, by the estimate
//!   (`key_rate.rs` defines the expected output).
//! - While a stream runs, tokens beyond the charge raise the charge in steps, each to twice the
//!   output so far ([`InFlight::observe`]). So a lock is taken once for each doubling.
//! - When the request ends, the charge is corrected to the tokens used ([`InFlight::settle`]). A
//!   request that is dropped without settlement stays charged.

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
/// The longest `Retry-After` for a day's limit of which this gateway has only a part, because the
/// part may grow at any renewal.
const PART_GROWS: Duration = Duration::from_secs(60);

/// A limit of the key is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyLimitExceeded {
    /// The limit.
    pub limit: KeyLimit,
    /// How long the client should wait before it tries again.
    pub retry_after: Duration,
}

/// Why a request exceeds the limits of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyNeedError {
    /// The request and the other requests of the key together are above a limit.
    Exceeded(KeyLimitExceeded),
    /// The request alone is above a limit, even if no other request is running.
    TooLarge(TooLarge),
}

/// The tokens that a request has used of its key's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsedTokens {
    /// Only the expected tokens are known.
    AsCharged,
    /// The tokens were counted.
    Counted {
        /// Prompt tokens.
        prompt: u64,
        /// Output tokens of all sequences.
        output: u64,
        /// Whether the response is complete. If so, it shows the output to expect of later
        /// requests.
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
    /// Whether the request counts against the limits on requests, sequences and tokens in flight.
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
    /// Above this number of output tokens, [`InFlight::observe`] charges more.
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
    /// `permitted`: the most output tokens of all sequences, if the request bounds them.
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

    fn charge(&mut self, need: &Need, limits: TokenLimits, now: Instant) -> Result<(), Exceeded> {
        let counters = Arc::clone(&self.counters);
        let mut budget = counters.budget.lock();
        budget.settle(limits, now);
        counters.share.note(KeyUnit::TokenRate, need.tokens(), 0);
        let in_window = budget.used(limits).1;
        counters.share.note(KeyUnit::DayTokens, need.tokens(), in_window.saturating_add(need.tokens()));
        let output = budget.charge(need, Some(self.charge.permitted).filter(|most| *most < u64::MAX), limits);
        budget.take(need.prompt_tokens.saturating_add(output), limits, now).map_err(|found| {
            // The gateway's part may grow soon, so the client need not wait as long as the present
            // part would take.
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

    /// Notes the number of output tokens so far. Costs a comparison, unless the tokens exceed the
    /// charge.
    pub fn observe(&mut self, output: u64) {
        if output > self.charge.step {
            self.exceed(output, Instant::now());
        }
    }

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

    /// Ends the count against the limits on requests, sequences and tokens in flight: the engine
    /// has ended the request. Idempotent.
    pub fn release(&mut self) {
        if std::mem::replace(&mut self.counted, false) {
            self.counters.sequences.fetch_sub(self.sequences, Ordering::AcqRel);
            self.counters.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
            self.counters.in_flight.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Corrects the charge to the tokens used. Only the first call has an effect.
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
