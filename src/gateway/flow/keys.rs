//! API keys: which models a key may use, how many requests at once, and how fast.
//!
//! A client's key is hashed once per request and looked up by its digest; the digest found is compared in constant
//! time. Requests in flight and the request rate of a key survive a reload: they are kept by digest in a side table, so
//! that changing a limit neither resets nor releases anything.
//!
//! Rate: the generic cell rate algorithm (ITU-T I.371). Each request is due `60 s / rate` after the one before it, and
//! due times may be ahead of the clock by at most [`BURST`]. Exact, one timestamp per key, no timer.
//! Bounds: the side table holds at most `MAX_KEYS` digests, those of the configuration.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

use crate::config::{Auth, Key};
use sluice_core::base::ModelId;

/// How much of a key's rate may be used at once.
const BURST: Duration = Duration::from_secs(10);

/// What a key has used; survives reloads.
#[derive(Debug, Default)]
struct KeyCounters {
    in_flight: AtomicU32,
    /// When the next request is due, if the key has a rate.
    due: Mutex<Option<Instant>>,
}

/// The usage of every key, across reloads.
#[derive(Debug, Default)]
pub struct KeyUsage(DashMap<[u8; 32], Arc<KeyCounters>>);

/// The keys of one configuration.
#[derive(Debug, Default)]
pub struct Keyring(HashMap<[u8; 32], ApiKey>);

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
    /// When to try again.
    pub retry_after: Duration,
}

/// A configured key. A clone is the same key.
#[derive(Clone, Debug)]
pub struct ApiKey {
    name: Arc<str>,
    key: Arc<Key>,
    counters: Arc<KeyCounters>,
}

/// One request of a key in flight; counts until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<KeyCounters>);

impl Keyring {
    /// The keys of `auth`, with the usage they had before.
    pub fn new(auth: &Auth, usage: &KeyUsage) -> Self {
        let keys: HashMap<_, _> = auth
            .keys
            .iter()
            .map(|key| {
                let counters = Arc::clone(&usage.0.entry(*key.sha256.bytes()).or_default());
                let key = ApiKey { name: key.name.as_str().into(), key: Arc::new(key.clone()), counters };
                (*key.key.sha256.bytes(), key)
            })
            .collect();
        usage.0.retain(|digest, used| keys.contains_key(digest) || used.in_flight.load(Ordering::Relaxed) > 0);
        Self(keys)
    }

    /// Whether clients must send a key.
    pub fn is_required(&self) -> bool {
        !self.0.is_empty()
    }

    /// The key that a client sent; `None` where none is required.
    pub fn authenticate(&self, sent: Option<&str>) -> Result<Option<ApiKey>, KeyError> {
        if !self.is_required() {
            return Ok(None);
        }
        let sent = sent.ok_or(KeyError::Missing)?;
        let digest: [u8; 32] = Sha256::digest(sent.as_bytes()).into();
        let found = self.0.get(&digest).filter(|found| bool::from(found.key.sha256.bytes().ct_eq(&digest)));
        found.cloned().map(Some).ok_or(KeyError::Unknown)
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

    /// Counts one request against the key's limits.
    pub fn start_request(&self, now: Instant) -> Result<InFlight, KeyLimitExceeded> {
        let used = self.counters.in_flight.fetch_add(1, Ordering::AcqRel);
        let counted = InFlight(Arc::clone(&self.counters));
        if self.key.limit.in_flight.is_some_and(|limit| used >= limit) {
            return Err(KeyLimitExceeded { retry_after: Duration::from_secs(1) });
        }
        if let Some(rate) = self.key.limit.requests_per_minute {
            let interval = Duration::from_secs(60) / rate.max(1);
            let mut due = self.counters.due.lock();
            let next = due.map_or(now, |due| due.max(now));
            let ahead = next.saturating_duration_since(now);
            if ahead > BURST.saturating_sub(interval) && ahead > Duration::ZERO {
                return Err(KeyLimitExceeded { retry_after: ahead.saturating_sub(BURST.saturating_sub(interval)) });
            }
            *due = Some(next + interval);
        }
        Ok(counted)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{KeyDigest, KeyLimit, ModelScope};

    fn auth(limit: KeyLimit) -> Auth {
        let key = Key {
            name: "team-a".to_owned(),
            sha256: KeyDigest::new(Sha256::digest(b"secret").into(), None),
            models: ModelScope::Only(vec![ModelId::new(1)]),
            priority: 0,
            limit,
        };
        Auth { keys: vec![key], admin_token: None }
    }

    fn known(ring: &Keyring) -> ApiKey {
        ring.authenticate(Some("secret")).unwrap().unwrap()
    }

    #[test]
    fn only_the_right_key_is_recognised_and_only_for_its_models() {
        let ring = Keyring::new(&auth(KeyLimit::default()), &KeyUsage::default());
        assert_eq!(ring.authenticate(None).unwrap_err(), KeyError::Missing);
        assert_eq!(ring.authenticate(Some("Secret")).unwrap_err(), KeyError::Unknown);
        let key = known(&ring);
        assert!(key.may_use(Some(ModelId::new(1))));
        assert!(!key.may_use(Some(ModelId::new(0))));
        assert!(!key.may_use(None));
    }

    #[test]
    fn requests_in_flight_are_counted_until_dropped_and_across_a_reload() {
        let usage = KeyUsage::default();
        let limit = KeyLimit { in_flight: Some(1), requests_per_minute: None };
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
        let limit = KeyLimit { in_flight: None, requests_per_minute: Some(60) };
        let ring = Keyring::new(&auth(limit), &KeyUsage::default());
        let key = known(&ring);
        let start = Instant::now();
        let at_once = (0..100).take_while(|_| key.start_request(start).is_ok()).count();
        assert_eq!(at_once, 10);
        assert_eq!(key.start_request(start).unwrap_err(), KeyLimitExceeded { retry_after: Duration::from_secs(1) });
        assert!(key.start_request(start + Duration::from_secs(1)).is_ok());
        assert!(key.start_request(start + Duration::from_secs(1)).is_err());
    }
}
