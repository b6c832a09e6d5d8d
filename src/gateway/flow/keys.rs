//! API keys: which models a key may use, how much at once, and how fast.
//!
//! Each key that a client sends is hashed and looked up by its digest, until one is configured; the digest found is compared
//! in constant time. What a key uses survives a reload: it is kept by digest in a side table, so that changing a limit neither resets
//! nor releases anything.
//!
//! Limits on concurrency, counted from admission to the end of the response: requests (`in_flight`), sequences (`sequences`:
//! prompts times `n`) and tokens (`tokens`: estimated prompt and expected output, as on a backend).
//!
//! Limits on rate use the generic cell rate algorithm (ITU-T I.371). Each request moves the key's due time on by `60 s / rate`,
//! and is refused if the due time would then be too far ahead of the clock: further than [`BURST`], and than [`BURST_REQUESTS`]
//! requests take, or all of a minute if these are fewer. How far it is ahead is kept, because it falls more slowly where several
//! gateways share the rate. So a key with 2 requests per minute may send both at once. For a limit
//! on tokens, a request moves the due time on by `60 s / rate` for each of its tokens, and the tokens of a whole minute may be
//! used at once. The algorithm is exact and needs one timestamp per key and rate, and no timer.
//!
//! Where several gateways hold the limits together, each may use its part of them ([`key_share`](super::key_share)).
//!
//! Bounds: the side table holds at most `MAX_KEYS` digests, those of the configuration.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

use super::key_share::{KeyAmounts, KeyShare, KeyUnit, KeyUse, limits_of};
use crate::config::{Auth, Key};
use crate::pool::Need;
use sluice_core::base::ModelId;
use sluice_core::openai::{KeyLimit, LimitUnit, TooLarge};

/// How much of a key's rate may be used at once.
const BURST: Duration = Duration::from_secs(10);
/// Requests that may be sent at once, where the rate allows so many in a minute.
const BURST_REQUESTS: u32 = 10;
/// The unit of time of the rates.
const MINUTE: Duration = Duration::from_secs(60);
/// `Retry-After` when a limit on concurrency is exceeded: the smallest value that the header allows.
const SOON: Duration = Duration::from_secs(1);

/// What a key has used; survives reloads.
#[derive(Debug, Default)]
struct KeyCounters {
    in_flight: AtomicU32,
    sequences: AtomicU64,
    tokens: AtomicU64,
    /// How far ahead of the clock the next request is due, if the key has a rate.
    due: Mutex<Ahead>,
    /// How far the next token is, if the key has a rate of them.
    tokens_due: Mutex<Ahead>,
    /// Its name and limits in the configuration.
    configured: Mutex<(Arc<str>, [Option<u64>; 5])>,
    share: KeyShare,
}

/// The usage of every key, across reloads.
#[derive(Debug, Default)]
pub struct KeyUsage {
    keys: DashMap<[u8; 32], Arc<KeyCounters>>,
    /// Gateways that divide the limits; 0: they are not divided.
    gateways: AtomicU64,
}

/// How far a due time is ahead of the clock: what a key owes, in the time that its whole rate takes for that.
#[derive(Debug, Default)]
struct Ahead {
    by: Duration,
    at: Option<Instant>,
}

impl Ahead {
    /// At `now`; since the last time it has fallen by `part / limit` of what has passed.
    fn settle(&mut self, now: Instant, part: u64, limit: u64) {
        let passed = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let paid = if part >= limit { passed } else { passed.mul_f64(part as f64 / limit.max(1) as f64) };
        (self.by, self.at) = (self.by.saturating_sub(paid), Some(self.at.map_or(now, |at| at.max(now))));
    }

    /// Moves it on by `cost`, unless it would be more than `burst` ahead; the error is by how much.
    fn advance(&mut self, cost: Duration, burst: Duration) -> Result<(), Duration> {
        let next = self.by + cost;
        if next > burst {
            return Err(next - burst);
        }
        self.by = next;
        Ok(())
    }
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
    /// Its need, together with that of the other requests of the key, is above a limit.
    Exceeded(KeyLimitExceeded),
    /// Its need alone is above a limit, even if no other request is running.
    TooLarge(TooLarge),
}

/// A configured key. Clones share the same counters.
#[derive(Clone, Debug)]
pub struct ApiKey {
    name: Arc<str>,
    pub(super) key: Arc<Key>,
    counters: Arc<KeyCounters>,
}

/// One request of a key in flight; counts until dropped.
#[derive(Debug)]
pub struct InFlight {
    key: Arc<Key>,
    counters: Arc<KeyCounters>,
    sequences: u64,
    tokens: u64,
}

impl KeyUsage {
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
            ];
            let (wanted, largest) = counters.share.take((elapsed, now), used);
            let with_limit =
                |amounts: KeyAmounts| [0, 1, 2, 3, 4].map(|at: usize| limits[at].map_or(0, |_| amounts[at]));
            let (wanted, largest) = (with_limit(wanted), with_limit(largest));
            let used = with_limit([used[0], used[1], used[2], 0, 0]);
            uses.push(KeyUse { name: name.to_string(), wanted, largest, used });
        }
        uses
    }

    /// Of the limits of each key this gateway, one of so many, uses at most `part`, from the name and the limits of the key.
    pub fn divide(&self, gateways: u64, now: Instant, mut part: impl FnMut(&str, &[Option<u64>; 5]) -> KeyAmounts) {
        self.gateways.store(gateways, Ordering::Relaxed);
        for counters in &self.keys {
            let (name, limits) = counters.configured.lock().clone();
            // Until now the rates were those of the part before.
            let settle = |due: &Mutex<Ahead>, unit: KeyUnit| {
                if let Some(limit) = limits[unit as usize] {
                    due.lock().settle(now, counters.share.of(unit, limit), limit);
                }
            };
            settle(&counters.due, KeyUnit::RequestRate);
            settle(&counters.tokens_due, KeyUnit::TokenRate);
            counters.share.set(&part(&name, &limits));
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
        gone.for_each(|used| used.configured.lock().1 = [None; 5]);
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

    /// Its priority; lower goes first.
    pub fn priority(&self) -> i32 {
        self.key.priority
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
        limit.tokens.into_iter().chain(limit.tokens_per_minute).map(|tokens| tokens.0).min()
    }

    /// Counts one request against the key's limits on requests.
    pub fn start_request(&self, now: Instant) -> Result<InFlight, KeyLimitExceeded> {
        let used = self.counters.in_flight.fetch_add(1, Ordering::AcqRel);
        let (key, counters) = (Arc::clone(&self.key), Arc::clone(&self.counters));
        let counted = InFlight { key, counters, sequences: 0, tokens: 0 };
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

impl InFlight {
    /// Counts the sequences and tokens of the request against the key's limits. Called once.
    pub fn take(&mut self, need: &Need, now: Instant) -> Result<(), KeyNeedError> {
        let (limit, counters) = (&self.key.limit, &self.counters);
        let (sequences, tokens) = (u64::from(need.slots), need.tokens());
        let limits = [
            (LimitUnit::Sequences, sequences, limit.sequences.map(u64::from)),
            (LimitUnit::Tokens, tokens, limit.tokens.map(|tokens| tokens.0)),
            (LimitUnit::Tokens, tokens, limit.tokens_per_minute.map(|tokens| tokens.0)),
        ];
        for (unit, wanted, limit) in limits {
            if let Some(limit) = limit.filter(|limit| wanted > *limit) {
                return Err(KeyNeedError::TooLarge(TooLarge { unit, wanted, limit }));
            }
        }
        (self.sequences, self.tokens) = (sequences, tokens);
        let sequences_used = counters.sequences.fetch_add(sequences, Ordering::AcqRel).saturating_add(sequences);
        let tokens_used = counters.tokens.fetch_add(tokens, Ordering::AcqRel).saturating_add(tokens);
        let exceeded = |limit, retry_after| KeyNeedError::Exceeded(KeyLimitExceeded { limit, retry_after });
        let share = &counters.share;
        share.note(KeyUnit::Sequences, sequences, sequences_used);
        share.note(KeyUnit::Tokens, tokens, tokens_used);
        share.note(KeyUnit::TokenRate, tokens, 0);
        let above = |unit, used: u64, limit: Option<u64>| limit.filter(|limit| used > share.of(unit, *limit));
        if let Some(limit) = above(KeyUnit::Sequences, sequences_used, limits[0].2) {
            return Err(exceeded(KeyLimit::Sequences(limit), SOON));
        }
        if let Some(limit) = above(KeyUnit::Tokens, tokens_used, limits[1].2) {
            return Err(exceeded(KeyLimit::Tokens(limit), SOON));
        }
        if let Some(rate) = limits[2].2 {
            let part = share.of(KeyUnit::TokenRate, rate);
            let (time, share) = (MINUTE.mul_f64(tokens as f64 / rate.max(1) as f64), part as f64 / rate.max(1) as f64);
            let mut due = counters.tokens_due.lock();
            due.settle(now, part, rate);
            // Of a part that is smaller than it will be, no client should stay away for as long as the part would take.
            let after = |after: Duration| if part >= rate { after } else { after.max(SOON) };
            let advanced = due.advance(time, part_of(MINUTE, share));
            advanced.map_err(|late| exceeded(KeyLimit::TokenRate(rate), after(late)))?;
        }
        Ok(())
    }
}

/// A part of a time, exactly all of it where it is all.
fn part_of(time: Duration, share: f64) -> Duration {
    if share >= 1.0 { time } else { time.mul_f64(share) }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.counters.sequences.fetch_sub(self.sequences, Ordering::AcqRel);
        self.counters.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
        self.counters.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, KeyDigest, ModelScope};
    use sluice_core::base::Tokens;

    fn auth(limit: config::KeyLimit) -> Auth {
        let key = Key {
            name: "team-a".to_owned(),
            sha256: KeyDigest::new(Sha256::digest(b"secret").into(), None),
            models: ModelScope::Only(vec![ModelId::new(1)]),
            priority: 0,
            weight: 1.0,
            limit,
        };
        Auth { keys: vec![key], admin_token: None }
    }

    fn known(ring: &Keyring) -> ApiKey {
        ring.authenticate(Some("secret")).unwrap().unwrap()
    }

    #[test]
    fn only_the_right_key_is_recognised_and_only_for_its_models() {
        let ring = Keyring::new(&auth(config::KeyLimit::default()), &KeyUsage::default());
        assert_eq!(ring.authenticate(None).unwrap_err(), KeyError::Missing);
        assert_eq!(ring.authenticate(Some("Secret")).unwrap_err(), KeyError::Unknown);
        assert!(ring.authenticate(["foreign", "secret"]).is_ok(), "a foreign token does not hide a key");
        let key = known(&ring);
        assert!(key.may_use(Some(ModelId::new(1))));
        assert!(!key.may_use(Some(ModelId::new(0))));
        assert!(!key.may_use(None));
    }

    #[test]
    fn requests_in_flight_are_counted_until_dropped_and_across_a_reload() {
        let usage = KeyUsage::default();
        let limit = config::KeyLimit { in_flight: Some(1), ..config::KeyLimit::default() };
        let now = Instant::now();
        let first = known(&Keyring::new(&auth(limit.clone()), &usage)).start_request(now).unwrap();
        let reloaded = Keyring::new(&auth(limit), &usage);
        let key = known(&reloaded);
        assert!(key.start_request(now).is_err());
        drop(first);
        assert!(key.start_request(now).is_ok());
    }

    #[test]
    fn a_rate_allows_a_burst_and_then_its_pace() {
        let limit = config::KeyLimit { requests_per_minute: Some(60), ..config::KeyLimit::default() };
        let ring = Keyring::new(&auth(limit), &KeyUsage::default());
        let key = known(&ring);
        let start = Instant::now();
        let at_once = (0..100).take_while(|_| key.start_request(start).is_ok()).count();
        assert_eq!(at_once, 10);
        let exceeded = KeyLimitExceeded { limit: KeyLimit::RequestRate(60), retry_after: Duration::from_secs(1) };
        assert_eq!(key.start_request(start).unwrap_err(), exceeded);
        assert!(key.start_request(start + Duration::from_secs(1)).is_ok());
        assert!(key.start_request(start + Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_small_rate_may_be_used_at_once_and_a_large_one_for_ten_seconds() {
        let now = Instant::now();
        for (rate, at_once) in [(1, 1), (2, 2), (7, 7), (10, 10), (30, 10), (60, 10), (600, 100)] {
            let limit = config::KeyLimit { requests_per_minute: Some(rate), ..config::KeyLimit::default() };
            let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
            let found = (0..200).take_while(|_| key.start_request(now).is_ok()).count();
            assert_eq!(found, at_once, "{rate} per minute");
            let exceeded = key.start_request(now).unwrap_err();
            assert_eq!(exceeded.limit, KeyLimit::RequestRate(rate.into()));
            assert!(key.start_request(now + exceeded.retry_after).is_ok(), "{rate} per minute: after its retry_after");
        }
    }

    fn need(slots: u32, tokens: u64) -> Need {
        Need { slots, prompt_tokens: tokens, output_tokens: 0 }
    }

    fn exceeded(result: Result<(), KeyNeedError>) -> Duration {
        match result {
            Err(KeyNeedError::Exceeded(exceeded)) => exceeded.retry_after,
            other => panic!("expected a limit on what runs at once, got {other:?}"),
        }
    }

    #[test]
    fn sequences_and_tokens_are_counted_until_the_request_ends() {
        let limit = config::KeyLimit { sequences: Some(8), tokens: Some(Tokens(1_000)), ..config::KeyLimit::default() };
        let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
        let now = Instant::now();
        let mut wide = key.start_request(now).unwrap();
        wide.take(&need(6, 600), now).unwrap();
        for need in [need(3, 1), need(1, 401)] {
            assert_eq!(exceeded(key.start_request(now).unwrap().take(&need, now)), SOON);
        }
        let mut beside = key.start_request(now).unwrap();
        beside.take(&need(2, 400), now).unwrap();
        drop((wide, beside));
        key.start_request(now).unwrap().take(&need(8, 1_000), now).unwrap();
    }

    #[test]
    fn a_request_above_a_limit_by_itself_is_refused_with_the_limit() {
        let limits = config::KeyLimit {
            sequences: Some(8),
            tokens: Some(Tokens(1_000)),
            tokens_per_minute: Some(Tokens(900)),
            ..config::KeyLimit::default()
        };
        let key = known(&Keyring::new(&auth(limits), &KeyUsage::default()));
        assert_eq!(key.tokens_limit(), Some(900));
        let now = Instant::now();
        let cases = [
            (need(9, 1), LimitUnit::Sequences, 9, 8),
            (need(1, 1_001), LimitUnit::Tokens, 1_001, 1_000),
            (need(1, 901), LimitUnit::Tokens, 901, 900),
        ];
        for (need, unit, wanted, limit) in cases {
            let refused = key.start_request(now).unwrap().take(&need, now);
            assert_eq!(refused, Err(KeyNeedError::TooLarge(TooLarge { unit, wanted, limit })));
        }
        key.start_request(now).unwrap().take(&need(8, 900), now).expect("what was refused is not counted");
    }

    #[test]
    fn a_rate_of_tokens_allows_a_minute_s_worth_at_once_and_then_its_pace() {
        let limit = config::KeyLimit { tokens_per_minute: Some(Tokens(6_000)), ..config::KeyLimit::default() };
        let key = known(&Keyring::new(&auth(limit), &KeyUsage::default()));
        let start = Instant::now();
        let take = |tokens, after: u64| {
            let now = start + Duration::from_secs(after);
            key.start_request(now).unwrap().take(&need(1, tokens), now)
        };
        take(4_000, 0).unwrap();
        take(2_000, 0).unwrap();
        assert_eq!(exceeded(take(1_000, 0)), Duration::from_secs(10), "1,000 tokens are 10 s");
        take(1_000, 10).unwrap();
        assert_eq!(exceeded(take(100, 10)), Duration::from_secs(1));
    }
}
