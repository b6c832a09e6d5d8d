//! Usage of a key under limits on rates: how far the key is ahead of its rate, and the tokens used
//! within a day.
//!
//! The estimate of a request is charged when the request is admitted; when it ends, the charge is
//! settled with the tokens used (`in_flight.rs`). Usage above the charge becomes debt, which is
//! paid off at the key's rate before more requests of the key are admitted. At the key's whole
//! rate, debt takes at most [`DEBT_MAX`] to pay off, so a wrong number does not lock a key out for
//! long.
//!
//! A day is the last 24 hours, counted in steps of [`STEP`], so usage leaves it up to one step
//! late. Without `max_tokens` the output is unknown when a request is charged. So that many such
//! requests at once cannot exceed the limit, each sequence is charged at least a part of the limit
//! ([`TokenBudget::charge`]), and a smaller part once a response of this key was complete.
//!
//! Bounds: one [`Ahead`] per rate, and [`STEPS`] counts per key with a limit for a day.

use std::time::Duration;

use tokio::time::Instant;

use crate::estimate::{OutputBounds, OutputEstimator};
use crate::pool::Need;

pub(super) const MINUTE: Duration = Duration::from_secs(60);
/// The most that a key may owe beyond the amount that it may use at once, as the time that the
/// key's whole rate takes for the debt.
pub(super) const DEBT_MAX: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The steps in which the window of a day moves.
const STEP: Duration = Duration::from_secs(15 * 60);
/// Number of steps that are counted: the steps of a day, and the current one.
const STEPS: usize = (DAY.as_secs() / STEP.as_secs()) as usize + 1;

/// Output tokens expected of a sequence whose key has no history: a long answer with reasoning.
const UNKNOWN_OUTPUT: u64 = 16_384;
/// If the key's limit is small, this number of such sequences takes all of it.
const UNKNOWN_AT_ONCE: u64 = 2;
/// As [`UNKNOWN_OUTPUT`], for keys that have had a complete response. A stream with 34 tokens a
/// second generates as much in a minute, so a key with shorter answers can still use the whole
/// limit.
const KNOWN_OUTPUT: u64 = 2_048;
const KNOWN_AT_ONCE: u64 = 4;

/// How far a due time is ahead of the clock: the tokens or requests that a key owes, as the time
/// that the key's whole rate takes for them.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    by: Duration,
    at: Option<Instant>,
    /// The key's rate at the last call, in units per minute.
    limit: u64,
}

impl Ahead {
    /// Updates the lead over the clock to `now`. Since the last call, it has fallen by `part /
    /// limit` of the time that has passed. If a reload has changed the rate, the key still owes as
    /// many tokens or requests, for which the new rate takes another time.
    pub(super) fn settle(&mut self, now: Instant, part: u64, limit: u64) {
        let limit = limit.max(1);
        let before = std::mem::replace(&mut self.limit, limit);
        if before != limit && before > 0 {
            self.by = self.by.mul_f64(before as f64 / limit as f64).min(MINUTE + DEBT_MAX);
        }
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let paid = if part >= limit { passed } else { passed.mul_f64(part as f64 / limit as f64) };
        (self.by, self.at) = (self.by.saturating_sub(paid), Some(self.at.map_or(now, |at| at.max(now))));
    }

    /// Moves the due time on by `cost`, unless it would then be more than `burst` ahead of the
    /// clock. The error is the excess.
    pub(super) fn advance(&mut self, cost: Duration, burst: Duration) -> Result<(), Duration> {
        let next = self.by + cost;
        if next > burst {
            return Err(next - burst);
        }
        self.by = next;
        Ok(())
    }

    /// Moves the due time on by a cost that has arisen, at most to [`DEBT_MAX`] beyond a minute.
    fn owe(&mut self, cost: Duration) {
        self.by = self.by.saturating_add(cost).min(MINUTE + DEBT_MAX).max(self.by);
    }

    /// Takes back a cost that has not arisen.
    fn give_back(&mut self, cost: Duration) {
        self.by = self.by.saturating_sub(cost);
    }

    /// How far the due time was ahead when it was last settled.
    pub(super) fn by(&self) -> Duration {
        self.by
    }
}

#[derive(Debug)]
struct Day {
    /// When the first step began.
    since: Instant,
    /// The current step, counted from the first.
    step: u64,
    /// Tokens by step, at the step's number modulo [`STEPS`].
    used: [u64; STEPS],
    sum: u64,
}

impl Day {
    fn new(now: Instant) -> Self {
        Self { since: now, step: 0, used: [0; STEPS], sum: 0 }
    }

    fn turn(&mut self, now: Instant) {
        let step = now.saturating_duration_since(self.since).as_secs() / STEP.as_secs();
        let passed = step.saturating_sub(self.step).min(STEPS as u64);
        self.step = self.step.max(step);
        for back in 0..passed {
            let left = std::mem::take(&mut self.used[Self::place(self.step - back)]);
            self.sum = self.sum.saturating_sub(left);
        }
    }

    fn place(step: u64) -> usize {
        (step % STEPS as u64) as usize
    }

    fn add(&mut self, tokens: u64) {
        let used = &mut self.used[Self::place(self.step)];
        let added = used.saturating_add(tokens);
        self.sum = self.sum.saturating_add(added - *used);
        *used = added;
    }

    /// Takes tokens back, from the latest steps first.
    fn give_back(&mut self, mut tokens: u64) {
        for back in 0..(STEPS as u64).min(self.step + 1) {
            let used = &mut self.used[Self::place(self.step - back)];
            let taken = tokens.min(*used);
            *used -= taken;
            self.sum = self.sum.saturating_sub(taken);
            tokens -= taken;
        }
    }

    /// The time until `tokens` more fit into `limit`; zero if they fit now.
    fn room_in(&self, tokens: u64, limit: u64, now: Instant) -> Duration {
        let mut left = self.sum.saturating_add(tokens);
        if left <= limit {
            return Duration::ZERO;
        }
        let oldest = (self.step + 1).saturating_sub(STEPS as u64);
        for step in oldest..=self.step {
            left = left.saturating_sub(self.used[Self::place(step)]);
            if left <= limit {
                let leaves = STEP * u32::try_from(step + STEPS as u64).unwrap_or(u32::MAX);
                return (self.since + leaves).saturating_duration_since(now);
            }
        }
        DAY
    }
}

/// A limit as a request meets it: the whole limit, and the part that this gateway may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub(super) whole: u64,
    pub(super) part: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenLimits {
    pub(super) minute: Option<Limit>,
    pub(super) day: Option<Limit>,
}

impl TokenLimits {
    pub(super) fn is_none(&self) -> bool {
        self.minute.is_none() && self.day.is_none()
    }

    /// The most tokens that one request may be charged with.
    fn at_once(&self) -> u64 {
        self.minute.iter().chain(&self.day).map(|limit| limit.part).min().unwrap_or(u64::MAX)
    }
}

/// The limit that is exceeded, and the time until there is room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exceeded {
    Minute(Duration),
    Day(Duration),
}

/// The tokens used of a key's limits, and the usual output of the key's requests.
#[derive(Debug, Default)]
pub(super) struct TokenBudget {
    minute: Ahead,
    /// Created at the first charge under a limit for a day.
    day: Option<Box<Day>>,
    output: OutputEstimator,
}

/// The time that the whole rate takes for `tokens`.
fn time_for(tokens: u64, limit: Limit) -> Duration {
    MINUTE.mul_f64((tokens as f64 / limit.whole.max(1) as f64).min((DEBT_MAX + MINUTE).as_secs_f64()))
}

impl TokenBudget {
    pub(super) fn settle(&mut self, limits: TokenLimits, now: Instant) {
        if let Some(limit) = limits.minute {
            self.minute.settle(now, limit.part, limit.whole);
        }
        if let Some(day) = &mut self.day {
            day.turn(now);
        }
    }

    /// Output tokens to charge when a request is admitted. That is the expected output, but at
    /// least a part of the limit for each sequence (see the header), and at most the output that
    /// the request permits and the output that one request may be charged with.
    pub(super) fn charge(&self, need: &Need, permitted: Option<u64>, limits: TokenLimits) -> u64 {
        if permitted == Some(0) {
            return need.output_tokens;
        }
        let (limit, sequences) = (limits.at_once(), u64::from(need.slots.max(1)));
        let (expected, least) = match self.output.samples() {
            0 => (0, UNKNOWN_OUTPUT.min(limit / UNKNOWN_AT_ONCE)),
            _ => (self.output.expect(OutputBounds::default()), KNOWN_OUTPUT.min(limit / KNOWN_AT_ONCE)),
        };
        let of_all = expected.max(least).saturating_mul(sequences);
        let permitted = permitted.unwrap_or(u64::MAX);
        of_all.min(permitted).min(limit.saturating_sub(need.prompt_tokens)).max(need.output_tokens)
    }

    /// Charges `tokens` if they are within the limits. The caller has settled the budget.
    pub(super) fn take(&mut self, tokens: u64, limits: TokenLimits, now: Instant) -> Result<(), Exceeded> {
        if let Some(limit) = limits.day {
            let day = self.day.get_or_insert_with(|| Box::new(Day::new(now)));
            let wait = day.room_in(tokens, limit.part, now);
            if !wait.is_zero() {
                return Err(Exceeded::Day(wait));
            }
        }
        if let Some(limit) = limits.minute {
            let share = limit.part as f64 / limit.whole.max(1) as f64;
            let burst = if share >= 1.0 { MINUTE } else { MINUTE.mul_f64(share) };
            self.minute.advance(time_for(tokens, limit), burst).map_err(Exceeded::Minute)?;
        }
        if let Some(day) = self.day.as_mut().filter(|_| limits.day.is_some()) {
            day.add(tokens);
        }
        Ok(())
    }

    /// Corrects the charge of a request to the tokens used. The caller has settled the budget.
    pub(super) fn correct(&mut self, charged: u64, used: u64, limits: TokenLimits) {
        let (more, less) = (used.saturating_sub(charged), charged.saturating_sub(used));
        if let Some(limit) = limits.minute {
            self.minute.owe(time_for(more, limit));
            self.minute.give_back(time_for(less, limit));
        }
        if let Some(day) = self.day.as_mut().filter(|_| limits.day.is_some()) {
            day.add(more);
            day.give_back(less);
        }
    }

    /// Learns the output tokens of one sequence of a complete response.
    pub(super) fn learn(&mut self, tokens: u64) {
        self.output.learn(tokens);
    }

    /// Tokens that the key is ahead of the rate per minute, and tokens used within the last day.
    /// The caller has settled the budget.
    pub(super) fn used(&self, limits: TokenLimits) -> (u64, u64) {
        let minute = limits.minute.map_or(0.0, |limit| self.minute.by().as_secs_f64() / 60.0 * limit.whole as f64);
        (minute.round() as u64, self.day.as_ref().map_or(0, |day| day.sum))
    }
}

#[cfg(test)]
mod tests;
