//! API keys: which models a key may use, how much at once, and how fast.
//!
//! Each key that a client sends is hashed and looked up by its digest, until one is configured; the digest found is compared
//! in constant time. What a key uses survives a reload: it is kept by digest in a side table, so that changing a limit neither resets
//! nor releases anything.
//!
//! Limits on concurrency, counted from admission to the end of the response: requests (`in_flight`), sequences (`sequences`:
//! prompts times `n`) and tokens (`tokens`: estimated prompt and expected output, as on a backend).
//!
//! Limits on requests and tokens per minute use the generic cell rate algorithm (ITU-T I.371). Each
//! request moves the key's due time on by `60 s / rate`,
//! and is refused if the due time would then be too far ahead of the clock: further than [`BURST`], and than [`BURST_REQUESTS`]
//! requests take, or all of a minute if these are fewer. How far it is ahead is kept, because it falls more slowly where several
//! gateways share the rate. So a key with 2 requests per minute may send both at once. For a limit
//! on tokens, a request moves the due time on by `60 s / rate` for each of its tokens, and the tokens of a whole minute may be
//! used at once. The algorithm is exact and needs one timestamp per key and rate, and no timer. A
//! limit on tokens per day counts the last 24 hours. Tokens are charged by the estimate and settled
//! with the usage (`in_flight.rs`, `key_rate.rs`).
//!
//! Where several gateways hold the limits together, each may use its part of them ([`key_share`](super::key_share)).
//!
//! Bounds: the side table holds at most `MAX_KEYS` digests, those of the configuration.

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
use crate::config::{Auth, Key, PriorityRange};
use sluice_core::base::ModelId;
use sluice_core::openai::KeyLimit;

/// How much of a key's rate may be used at once.
const BURST: Duration = Duration::from_secs(10);
/// Requests that may be sent at once, where the rate allows so many in a minute.
const BURST_REQUESTS: u32 = 10;

/// The usage of every key, across reloads.
#[derive(Debug, Default)]
pub struct KeyUsage {
    keys: DashMap<[u8; 32], Arc<KeyCounters>>,
    /// Gateways that divide the limits; 0: they are not divided.
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
    /// Tokens that the key is ahead of `tokens_per_minute`, above the limit if it is in debt; and
    /// the limit.
    pub minute: Option<(u64, u64)>,
    /// Tokens used within the last 24 hours, and `tokens_per_day`.
    pub day: Option<(u64, u64)>,
}

/// The most keys that [`KeyUsage::tokens`] returns.
pub const KEYS_SHOWN: usize = 256;

impl KeyUsage {
    /// The usage of keys with limits on tokens on this gateway, keys nearest to a limit first; at
    /// most [`KEYS_SHOWN`].
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

    /// What each key with a limit would use, since the last call `elapsed` ago.
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

    /// Of the limits of each key this gateway, one of so many, uses at most `part`, from the name and the limits of the key.
    pub fn divide(&self, gateways: u64, now: Instant, mut part: impl FnMut(&str, &KeyLimits) -> KeyAmounts) {
        self.gateways.store(gateways, Ordering::Relaxed);
        for counters in &self.keys {
            let (name, limits) = counters.configured.lock().clone();
            counters.divide(&limits, &part(&name, &limits), now);
        }
    }

    /// The counters of a key, which begin with an even part of its limits.
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
    /// The keys of `auth`, with the usage they had before.
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
        // A key that was replaced has the name of the new one.
        let gone = usage.keys.iter().filter(|used| !keys.contains_key(used.key()));
        gone.for_each(|used| used.configured.lock().1 = [None; UNITS]);
        Self(keys)
    }

    /// Whether clients must send a key.
    pub fn is_required(&self) -> bool {
        !self.0.is_empty()
    }

    /// The first configured key of those that a client sent; `None` where none is required.
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
    /// Its configured name, for logs.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The priorities that its requests may have.
    pub fn priorities(&self) -> PriorityRange {
        self.key.priorities()
    }

    /// Whether it may use a model; `None` is a model that the configuration does not declare.
    pub fn may_use(&self, model: Option<ModelId>) -> bool {
        match model {
            Some(model) => self.key.models.includes(model),
            None => matches!(self.key.models, crate::config::ModelScope::All),
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

/// A part of a time, exactly all of it where it is all.
fn part_of(time: Duration, share: f64) -> Duration {
    if share >= 1.0 { time } else { time.mul_f64(share) }
}

#[cfg(test)]
mod tests;
