//! The usage of a key under its limits on rates: how far it is ahead of its pace, and the tokens
//! that it has used within a day.
//!
//! When a request is admitted, its estimate is charged to the limit on tokens. When it ends, the
//! charge is settled with the tokens that it has used (`in_flight.rs`). Usage above the charge
//! becomes debt, which the key's pace pays off before the key's requests are admitted again. If the
//! usage is below the charge, the difference is given back. Debt is at most [`DEBT_MAX`] of the
//! key's pace, so that no wrong number locks a key out for longer.
//!
//! A day is the last 24 hours, at any time of day: no wall clock takes part, and a limit that is
//! used up returns as yesterday's usage leaves the window. Usage is counted in steps of [`STEP`],
//! so it leaves the window up to one step late.
//!
//! Output without `max_tokens` is not known when it is charged. To use far more than its limit, a
//! key would only have to send many such requests at once. So at least a part of its limit is
//! charged for each sequence ([`TokenBudget::charge`]): a smaller part when requests of this key
//! have ended before. Requests of other keys say nothing about a key.
//!
//! Bounds: one timestamp for each pace, and [`STEPS`] counts for each key with a limit for a day.

use std::time::Duration;

use tokio::time::Instant;

use crate::estimate::{OutputBounds, OutputEstimator};
use crate::pool::Need;

/// The unit of time of the rates.
pub(super) const MINUTE: Duration = Duration::from_secs(60);
/// The most that a key may owe beyond the amount that it may use at once, as the time that its
/// whole rate takes for the debt.
pub(super) const DEBT_MAX: Duration = Duration::from_secs(60 * 60);
/// The window of the limit for a day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The steps in which it moves.
const STEP: Duration = Duration::from_secs(15 * 60);
/// Steps that are counted: the steps of a day, and the one that is under way.
const STEPS: usize = (DAY.as_secs() / STEP.as_secs()) as usize + 1;

/// Output that may be expected of a sequence whose key has no history, tokens: a long answer with
/// reasoning.
const UNKNOWN_OUTPUT: u64 = 16_384;
/// This many such sequences take the whole limit of a key, if it is small.
const UNKNOWN_AT_ONCE: u64 = 2;
/// The same where requests of the key have ended before. It is no more than a stream generates in a
/// minute at 34 tokens a second, so a key whose answers are shorter can still use its whole limit.
const KNOWN_OUTPUT: u64 = 2_048;
const KNOWN_AT_ONCE: u64 = 4;

/// How far a due time is ahead of the clock: the tokens or requests that a key owes, as the time
/// that its whole rate takes for them.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    by: Duration,
    at: Option<Instant>,
}

impl Ahead {
    /// Moves it to `now`: since the last time it has fallen by `part / limit` of the time that has
    /// passed.
    pub(super) fn settle(&mut self, now: Instant, part: u64, limit: u64) {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let paid = if part >= limit { passed } else { passed.mul_f64(part as f64 / limit.max(1) as f64) };
        (self.by, self.at) = (self.by.saturating_sub(paid), Some(self.at.map_or(now, |at| at.max(now))));
    }

    /// Moves it on by `cost`, unless it would be more than `burst` ahead; the error is by how much.
    pub(super) fn advance(&mut self, cost: Duration, burst: Duration) -> Result<(), Duration> {
        let next = self.by + cost;
        if next > burst {
            return Err(next - burst);
        }
        self.by = next;
        Ok(())
    }

    /// Moves it on by a cost that has arisen, at most to [`DEBT_MAX`] beyond a minute.
    fn owe(&mut self, cost: Duration) {
        self.by = self.by.saturating_add(cost).min(MINUTE + DEBT_MAX).max(self.by);
    }

    /// Takes back a cost that has not arisen.
    fn give_back(&mut self, cost: Duration) {
        self.by = self.by.saturating_sub(cost);
    }

    /// How far it was ahead when it was settled last.
    pub(super) fn by(&self) -> Duration {
        self.by
    }
}

/// Tokens used within the last day.
#[derive(Debug)]
struct Day {
    /// When the first step began.
    since: Instant,
    /// The step under way, counted from the first.
    step: u64,
    /// By step, modulo their number.
    used: [u64; STEPS],
    sum: u64,
}

impl Day {
    fn new(now: Instant) -> Self {
        Self { since: now, step: 0, used: [0; STEPS], sum: 0 }
    }

    /// Moves the window to `now`.
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

    /// Takes back tokens, from the latest steps.
    fn give_back(&mut self, mut tokens: u64) {
        for back in 0..(STEPS as u64).min(self.step + 1) {
            let used = &mut self.used[Self::place(self.step - back)];
            let taken = tokens.min(*used);
            *used -= taken;
            self.sum = self.sum.saturating_sub(taken);
            tokens -= taken;
        }
    }

    /// When this many tokens are within `limit`; zero if they are now.
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

/// A limit as a request meets it: the whole of it, and the part that this gateway may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub(super) whole: u64,
    pub(super) part: u64,
}

/// The limits of a key on tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenLimits {
    pub(super) minute: Option<Limit>,
    pub(super) day: Option<Limit>,
}

impl TokenLimits {
    /// Whether there are none.
    pub(super) fn is_none(&self) -> bool {
        self.minute.is_none() && self.day.is_none()
    }

    /// The most tokens that one request may be charged with.
    fn at_once(&self) -> u64 {
        self.minute.iter().chain(&self.day).map(|limit| limit.part).min().unwrap_or(u64::MAX)
    }
}

/// Which of them is exceeded, and when there is room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exceeded {
    Minute(Duration),
    Day(Duration),
}

/// The tokens that a key has used of its limits, and how long the output of its requests was.
#[derive(Debug, Default)]
pub(super) struct TokenBudget {
    minute: Ahead,
    /// Once it has a limit for a day.
    day: Option<Box<Day>>,
    output: OutputEstimator,
}

/// The time that the whole rate takes for this many tokens.
fn time_for(tokens: u64, limit: Limit) -> Duration {
    MINUTE.mul_f64((tokens as f64 / limit.whole.max(1) as f64).min((DEBT_MAX + MINUTE).as_secs_f64()))
}

impl TokenBudget {
    /// Moves everything to `now`.
    pub(super) fn settle(&mut self, limits: TokenLimits, now: Instant) {
        if let Some(limit) = limits.minute {
            self.minute.settle(now, limit.part, limit.whole);
        }
        if let Some(day) = &mut self.day {
            day.turn(now);
        }
    }

    /// Output tokens to charge for a request when it is admitted: the output that is expected of
    /// it, at least a part of the limit for each sequence (see the header), and at most the output
    /// that it permits and the output that one request may be charged with.
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

    /// Charges this many tokens, if they are within the limits. The budget was settled before.
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

    /// Corrects the charge of a request to the tokens that it has used. The budget was settled
    /// before.
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

    /// Learns how many tokens a sequence of a whole response had.
    pub(super) fn learn(&mut self, tokens: u64) {
        self.output.learn(tokens);
    }

    /// Tokens that the key is ahead of its rate for a minute, and tokens used within the last day.
    /// The budget was settled before.
    pub(super) fn used(&self, limits: TokenLimits) -> (u64, u64) {
        let minute = limits.minute.map_or(0.0, |limit| self.minute.by().as_secs_f64() / 60.0 * limit.whole as f64);
        (minute.round() as u64, self.day.as_ref().map_or(0, |day| day.sum))
    }
}

#[cfg(test)]
mod tests;
