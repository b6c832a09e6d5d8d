//! API keys: the models that a key may use, how much at once, and how fast.
//!
//! The keys that a client sends are hashed and looked up by digest; the first configured one
//! counts. Usage is kept by digest, so a reload neither resets nor releases anything. Limits on
//! concurrency count from admission to the end of the response: requests, sequences (prompts times
//! `n`) and tokens (prompt and expected output).
//!
//! Limits per minute use the generic cell rate algorithm (ITU-T I.371): exact, with one timestamp
//! per key and rate. Each request moves the due time of the key on by `60 s / rate`. It is refused
//! if the due time would then be ahead of the clock by more than [`BURST`], and by more than the
//! interval of [`BURST_REQUESTS`] requests (of a minute's requests, if these are fewer). For a
//! limit on tokens, each token moves the due time on, and a minute's tokens may be used at once.
//! `key_rate.rs` has limits per day, `key_share.rs` limits that gateways share.
//!
//! Bounds: the digests of at most `MAX_KEYS` configured keys, and of removed keys that still have
//! requests in flight.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

use super::in_flight::SOON;
pub use super::in_flight::{InFlight, KeyLimitExceeded, KeyNeedError, UsedTokens};
use super::key_counters::KeyCounters;
use super::key_rate::MINUTE;
use super::key_share::{KeyAmounts, KeyLimits, KeyUnit, KeyUse, UNITS, limits_of};
use sluice_config::{Auth, Key, PriorityRange};
use sluice_core::base::ModelId;
use sluice_core::openai::KeyLimit;

/// The share of a key's rate that may be used at once, as the time in which the rate yields it.
const BURST: Duration = Duration::from_secs(10);
/// Requests that may be sent at once, if the rate allows as many in a minute.
const BURST_REQUESTS: u32 = 10;

/// The usage of every key, across reloads.
#[derive(Debug, Default)]
pub struct KeyUsage {
    keys: DashMap<[u8; 32], Arc<KeyCounters>>,
    /// Number of gateways that divide the limits; 0: the limits are not divided.
    gateways: AtomicU64,
}

/// The keys of one configuration.
#[derive(Debug, Default)]
pub struct Keyring(pub(super) HashMap<[u8; 32], ApiKey>);

/// Why a client's key is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// No key was sent.
    Missing,
    /// The key is not configured.
    Unknown,
}

/// A configured key. Clones share the same counters.
#[derive(Clone, Debug)]
pub struct ApiKey {
    name: Arc<str>,
    pub(super) key: Arc<Key>,
    counters: Arc<KeyCounters>,
}

/// The tokens that a key has used of its limits, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyTokens {
    /// The name of the key.
    pub name: Arc<str>,
    /// The number of tokens that the key is ahead of `tokens_per_minute`, and the limit. The number
    /// is above the limit if the key is in debt.
    pub minute: Option<(u64, u64)>,
    /// Tokens used within the last 24 hours, and `tokens_per_day`.
    pub day: Option<(u64, u64)>,
}

/// The requests that a key has in flight on this gateway, and the limit of all gateways together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInFlight {
    /// The name of the key.
    pub name: Arc<str>,
    /// Requests.
    pub requests: (u64, Option<u64>),
    /// Sequences.
    pub sequences: (u64, Option<u64>),
    /// Tokens of prompts and expected outputs.
    pub tokens: (u64, Option<u64>),
}

/// The most keys that [`KeyUsage::tokens`] and [`KeyUsage::in_flight`] return.
pub const KEYS_SHOWN: usize = 256;

impl KeyUsage {
    /// The usage of keys with limits on tokens on this gateway, the keys nearest to a limit first;
    /// at most [`KEYS_SHOWN`].
    pub fn tokens(&self, now: Instant) -> Vec<KeyTokens> {
        let mut found: Vec<(f64, KeyTokens)> = Vec::new();
        for counters in &self.keys {
            let (name, limits) = counters.configured.lock().clone();
            let limit = |unit: KeyUnit| limits[unit as usize];
            let of_limits = (limit(KeyUnit::TokenRate), limit(KeyUnit::DayTokens));
            if of_limits == (None, None) {
                continue;
            }
            let (minute, day) = counters.used_tokens(&limits, now);
            let (minute, day) = (of_limits.0.map(|limit| (minute, limit)), of_limits.1.map(|limit| (day, limit)));
            let share = |used: Option<(u64, u64)>| used.map_or(0.0, |(used, limit)| used as f64 / limit.max(1) as f64);
            found.push((share(minute).max(share(day)), KeyTokens { name, minute, day }));
        }
        found.sort_by(|one, other| other.0.total_cmp(&one.0).then_with(|| one.1.name.cmp(&other.1.name)));
        found.into_iter().take(KEYS_SHOWN).map(|(_, tokens)| tokens).collect()
    }

    /// Keys that have requests in flight on this gateway, the keys with most requests first.
    /// Returns at most [`KEYS_SHOWN`].
    pub fn in_flight(&self) -> Vec<KeyInFlight> {
        let of = |counters: &KeyCounters| {
            let (name, limits) = counters.configured.lock().clone();
            KeyInFlight {
                name,
                requests: (counters.in_flight.load(Ordering::Relaxed).into(), limits[KeyUnit::InFlight as usize]),
                sequences: (counters.sequences.load(Ordering::Relaxed), limits[KeyUnit::Sequences as usize]),
                tokens: (counters.tokens.load(Ordering::Relaxed), limits[KeyUnit::Tokens as usize]),
            }
        };
        let all = self.keys.iter().map(|counters| of(&counters));
        let mut found: Vec<KeyInFlight> = all.filter(|key| key.requests.0 > 0).collect();
        found.sort_by(|one, other| other.requests.0.cmp(&one.requests.0).then_with(|| one.name.cmp(&other.name)));
        found.truncate(KEYS_SHOWN);
        found
    }

    /// The recent demand of each key with a limit. `elapsed`: the time since the last call.
    pub fn uses(&self, elapsed: Duration, now: Instant) -> Vec<KeyUse> {
        let mut uses = Vec::new();
        for counters in &self.keys {
            let (name, limits) = counters.configured.lock().clone();
            if limits.iter().all(Option::is_none) {
                continue;
            }
            let used = [
                counters.in_flight.load(Ordering::Relaxed).into(),
                counters.sequences.load(Ordering::Relaxed),
                counters.tokens.load(Ordering::Relaxed),
                counters.used_tokens(&limits, now).1,
            ];
            let (wanted, largest) = counters.share.take((elapsed, now), used);
            let with_limit =
                |amounts: KeyAmounts| -> KeyAmounts { std::array::from_fn(|at| limits[at].map_or(0, |_| amounts[at])) };
            let (wanted, largest) = (with_limit(wanted), with_limit(largest));
            let used = with_limit([used[0], used[1], used[2], 0, 0, used[3]]);
            uses.push(KeyUse { name: name.to_string(), wanted, largest, used });
        }
        uses
    }

    /// Limits this gateway, one of `gateways`, to a part of the limits of each key. `part` returns
    /// this part for the name and the limits of a key.
    pub fn divide(&self, gateways: u64, now: Instant, mut part: impl FnMut(&str, &KeyLimits) -> KeyAmounts) {
        self.gateways.store(gateways, Ordering::Relaxed);
        for counters in &self.keys {
            let (name, limits) = counters.configured.lock().clone();
            counters.divide(&limits, &part(&name, &limits), now);
        }
    }

    /// The counters of a key. If gateways divide the limits, new counters begin with an even part.
    fn counters(&self, key: &Key) -> Arc<KeyCounters> {
        let limits = limits_of(&key.limit);
        let gateways = self.gateways.load(Ordering::Relaxed);
        let counters = self.keys.entry(*key.sha256.bytes()).or_insert_with(|| {
            let counters = KeyCounters::default();
            if gateways > 0 {
                counters.share.set(&limits.map(|limit| limit.map_or(u64::MAX, |limit| limit.div_ceil(gateways))));
            }
            Arc::new(counters)
        });
        *counters.configured.lock() = (key.name.as_str().into(), limits);
        Arc::clone(&counters)
    }
}

impl Keyring {
    /// The keys of `auth`, with the usage from before.
    pub fn new(auth: &Auth, usage: &KeyUsage) -> Self {
        let keys: HashMap<_, _> = auth
            .keys
            .iter()
            .map(|key| {
                let counters = usage.counters(key);
                let key = ApiKey { name: key.name.as_str().into(), key: Arc::new(key.clone()), counters };
                (*key.key.sha256.bytes(), key)
            })
            .collect();
        usage.keys.retain(|digest, used| keys.contains_key(digest) || used.in_flight.load(Ordering::Relaxed) > 0);
        // Requests of a removed key still run. The counters lose their limits, because the key that
        // replaced it may have the same name.
        let gone = usage.keys.iter().filter(|used| !keys.contains_key(used.key()));
        gone.for_each(|used| used.configured.lock().1 = [None; UNITS]);
        Self(keys)
    }

    /// Whether clients must send a key.
    pub fn is_required(&self) -> bool {
        !self.0.is_empty()
    }

    /// The first configured key among the keys that a client sent; `None` if the gateway requires
    /// no key.
    pub fn authenticate<'a>(&self, sent: impl IntoIterator<Item = &'a str>) -> Result<Option<ApiKey>, KeyError> {
        if !self.is_required() {
            return Ok(None);
        }
        let mut error = KeyError::Missing;
        for sent in sent {
            let digest: [u8; 32] = Sha256::digest(sent.as_bytes()).into();
            let found = self.0.get(&digest).filter(|found| bool::from(found.key.sha256.bytes().ct_eq(&digest)));
            if let Some(found) = found {
                return Ok(Some(found.clone()));
            }
            error = KeyError::Unknown;
        }
        Err(error)
    }
}

impl ApiKey {
    /// The configured name: for logs and metrics, and as the identity of the client.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The priorities that requests of the key may have.
    pub fn priorities(&self) -> PriorityRange {
        self.key.priorities()
    }

    /// Whether the key may use a model; `None` is a model that the configuration does not declare.
    pub fn may_use(&self, model: Option<ModelId>) -> bool {
        match model {
            Some(model) => self.key.models.includes(model),
            None => matches!(self.key.models, sluice_config::ModelScope::All),
        }
    }

    /// The most tokens that one request of the key may take; `None` is no limit.
    pub fn tokens_limit(&self) -> Option<u64> {
        let limit = &self.key.limit;
        limit.tokens.into_iter().chain(limit.tokens_per_minute).chain(limit.tokens_per_day).map(|tokens| tokens.0).min()
    }

    /// Counts one request against the key's limits on requests.
    pub fn start_request(&self, now: Instant) -> Result<InFlight, KeyLimitExceeded> {
        let used = self.counters.in_flight.fetch_add(1, Ordering::AcqRel);
        let counted = InFlight::new(limits_of(&self.key.limit), Arc::clone(&self.counters));
        let share = &self.counters.share;
        share.note(KeyUnit::InFlight, 1, u64::from(used) + 1);
        share.note(KeyUnit::RequestRate, 1, 0);
        let is_full = |limit: &u32| u64::from(used) >= share.of(KeyUnit::InFlight, (*limit).into());
        if let Some(limit) = self.key.limit.in_flight.filter(is_full) {
            return Err(KeyLimitExceeded { limit: KeyLimit::InFlight(limit.into()), retry_after: SOON });
        }
        if let Some(rate) = self.key.limit.requests_per_minute {
            let exceeded = |retry_after| KeyLimitExceeded { limit: KeyLimit::RequestRate(rate.into()), retry_after };
            let part = share.of(KeyUnit::RequestRate, rate.into()).min(u32::MAX.into()) as u32;
            let (interval, share) = (MINUTE / rate.max(1), f64::from(part) / f64::from(rate.max(1)));
            let at_once = if part >= rate {
                rate.min(BURST_REQUESTS)
            } else {
                part.min((f64::from(BURST_REQUESTS) * share).ceil() as u32)
            };
            let burst = part_of(BURST, share).max(interval * at_once);
            let mut due = self.counters.due.lock();
            due.settle(now, part.into(), rate.into());
            due.advance(interval, burst)
                .map_err(|after| exceeded(if part >= rate { after } else { after.max(SOON) }))?;
        }
        Ok(counted)
    }
}

/// A part of a time; exactly all of it if `share` is 1.
fn part_of(time: Duration, share: f64) -> Duration {
    if share >= 1.0 { time } else { time.mul_f64(share) }
}

#[cfg(test)]
mod tests;
