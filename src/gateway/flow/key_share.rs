//! The part of a key's limits that this gateway may use where several gateways share them, and the
//! demand for it.
//!
//! `serve/cluster` divides the limits through [`KeyUsage::uses`](super::keys::KeyUsage::uses) and
//! [`KeyUsage::divide`](super::keys::KeyUsage::divide). Until the first division, this gateway may
//! use the whole limits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use sluice_config::KeyLimit;

/// A limit of a key, as its position in [`KeyAmounts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUnit {
    /// Requests at once.
    InFlight,
    /// Sequences at once.
    Sequences,
    /// Tokens at once.
    Tokens,
    /// Requests per minute.
    RequestRate,
    /// Tokens per minute.
    TokenRate,
    /// Tokens within the last day. They stay in use until they leave that window.
    DayTokens,
}

/// Number of units that a key may have limits on.
pub const UNITS: usize = 6;
/// An amount for each unit.
pub type KeyAmounts = [u64; UNITS];
/// The limit of each unit, if there is one.
pub type KeyLimits = [Option<u64>; UNITS];

/// Units that can be in use, in the order in which [`KeyShare::take`] gets their amounts.
const IN_USE: [KeyUnit; 4] = [KeyUnit::InFlight, KeyUnit::Sequences, KeyUnit::Tokens, KeyUnit::DayTokens];
const RATES: [KeyUnit; 2] = [KeyUnit::RequestRate, KeyUnit::TokenRate];

/// Time constant of the measured rates, seconds.
const RATE_SECONDS: f64 = 15.0;
/// A smaller rate, per minute, counts as zero.
const RATE_MIN: f64 = 0.05;
/// How long a demand counts: long enough for a refused client to come again, and longer than a
/// renewal takes.
const HELD: Duration = Duration::from_secs(3);

/// The demand of a key on this gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyUse {
    /// The key's name in the configuration.
    pub name: String,
    /// The most that was in use or asked for at once within the last seconds. For rates: the demand
    /// per minute.
    pub wanted: KeyAmounts,
    /// The largest request of the last seconds.
    pub largest: KeyAmounts,
    /// The amounts in use now; zero for rates.
    pub used: KeyAmounts,
}

/// The part of a key's limits that this gateway may use, and the measured demand.
#[derive(Debug)]
pub(super) struct KeyShare {
    parts: [AtomicU64; UNITS],
    wanted: [AtomicU64; UNITS],
    largest: [AtomicU64; UNITS],
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    rates: [f64; 2],
    /// For each call of [`KeyShare::take`] within [`HELD`]: the time, the most wanted at once, and
    /// the largest request.
    looks: VecDeque<(Instant, KeyAmounts, KeyAmounts)>,
}

impl Default for KeyShare {
    fn default() -> Self {
        let none = || [const { AtomicU64::new(0) }; UNITS];
        Self {
            parts: [const { AtomicU64::new(u64::MAX) }; UNITS],
            wanted: none(),
            largest: none(),
            measured: Mutex::default(),
        }
    }
}

pub(super) fn limits_of(limit: &KeyLimit) -> KeyLimits {
    [
        limit.in_flight.map(u64::from),
        limit.sequences.map(u64::from),
        limit.tokens.map(|tokens| tokens.0),
        limit.requests_per_minute.map(u64::from),
        limit.tokens_per_minute.map(|tokens| tokens.0),
        limit.tokens_per_day.map(|tokens| tokens.0),
    ]
}

impl KeyShare {
    /// The part of a limit that this gateway may use.
    pub(super) fn of(&self, unit: KeyUnit, limit: u64) -> u64 {
        limit.min(self.parts[unit as usize].load(Ordering::Relaxed))
    }

    /// Notes that a request asks for `asked`; `used`: the amount in use, with this request.
    pub(super) fn note(&self, unit: KeyUnit, asked: u64, used: u64) {
        let wanted = &self.wanted[unit as usize];
        match unit {
            KeyUnit::RequestRate | KeyUnit::TokenRate => wanted.fetch_add(asked, Ordering::Relaxed),
            KeyUnit::InFlight | KeyUnit::Sequences | KeyUnit::Tokens | KeyUnit::DayTokens => {
                wanted.fetch_max(used, Ordering::Relaxed)
            }
        };
        self.largest[unit as usize].fetch_max(asked, Ordering::Relaxed);
    }

    /// The demand and the largest request within [`HELD`]. `elapsed`: the time since the last call.
    /// `used`: the amounts in use now.
    pub(super) fn take(&self, (elapsed, now): (Duration, Instant), used: [u64; 4]) -> (KeyAmounts, KeyAmounts) {
        let mut wanted = [0; UNITS];
        let mut measured = self.measured.lock();
        for (unit, used) in IN_USE.into_iter().zip(used) {
            let at = unit as usize;
            wanted[at] = self.wanted[at].swap(used, Ordering::Relaxed).max(used);
        }
        let seconds = elapsed.as_secs_f64().max(0.001);
        let weight = 1.0 - (-seconds / RATE_SECONDS).exp();
        for (unit, rate) in RATES.into_iter().zip(&mut measured.rates) {
            let asked = self.wanted[unit as usize].swap(0, Ordering::Relaxed) as f64 / seconds * 60.0;
            *rate += weight * (asked - *rate);
            // The rate rises at once with a burst, and falls slowly.
            *rate = rate.max(weight * asked);
            if *rate < RATE_MIN {
                *rate = 0.0;
            }
            wanted[unit as usize] = rate.ceil() as u64;
        }
        let largest: KeyAmounts = std::array::from_fn(|at| self.largest[at].swap(0, Ordering::Relaxed));
        let rates = RATES.map(|unit| wanted[unit as usize]);
        measured.looks.retain(|(at, ..)| now.saturating_duration_since(*at) < HELD);
        measured.looks.push_back((now, wanted, largest));
        let most = |of: fn(&(Instant, KeyAmounts, KeyAmounts)) -> &KeyAmounts| {
            std::array::from_fn(|unit| measured.looks.iter().map(|look| of(look)[unit]).max().unwrap_or(0))
        };
        let (mut wanted, largest): (KeyAmounts, KeyAmounts) = (most(|look| &look.1), most(|look| &look.2));
        for (unit, rate) in RATES.into_iter().zip(rates) {
            wanted[unit as usize] = rate;
        }
        (wanted, largest)
    }

    pub(super) fn set(&self, parts: &KeyAmounts) {
        self.parts.iter().zip(parts).for_each(|(part, amount)| part.store(*amount, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_is_the_most_at_once_and_what_a_minute_would_bring() {
        let share = KeyShare::default();
        assert_eq!(share.of(KeyUnit::Tokens, 9), 9, "not divided");
        for used in [1, 4, 2] {
            share.note(KeyUnit::InFlight, 1, used);
            share.note(KeyUnit::RequestRate, 1, 0);
        }
        share.note(KeyUnit::Tokens, 700, 700);
        let mut now = Instant::now();
        let three = Duration::from_secs(3);
        let (wanted, largest) = share.take((three, now), [2, 0, 0, 0]);
        assert_eq!((wanted[0], wanted[2], largest), (4, 700, [1, 0, 700, 1, 0, 0]));
        assert!((10..=60).contains(&wanted[3]), "{wanted:?}");
        let soon = share.take((Duration::from_millis(500), now + Duration::from_secs(1)), [2, 0, 0, 0]);
        assert_eq!((soon.0[0], soon.1[2]), (4, 700), "a client that was refused comes again");
        let rates: Vec<u64> = (0..20)
            .map(|_| {
                now += three;
                (0..3).for_each(|_| share.note(KeyUnit::RequestRate, 1, 0));
                share.take((three, now), [2, 0, 0, 0]).0[3]
            })
            .collect();
        assert!(rates.last().unwrap().abs_diff(60) <= 1, "{rates:?}");
        let later = share.take((Duration::from_secs(300), now + Duration::from_secs(300)), [2, 0, 0, 0]);
        assert_eq!(later, ([2, 0, 0, 0, 0, 0], [0; 6]), "in use, and nothing new");
        share.set(&[3, 0, 5, 6, 7, 8]);
        assert_eq!((share.of(KeyUnit::InFlight, 9), share.of(KeyUnit::InFlight, 2)), (3, 2));
    }
}
