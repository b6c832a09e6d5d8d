//! Who may ask, for what, and how much at once.
//!
//! A client's key is hashed and looked up by its digest; the digest found is compared in constant
//! time. What a key has in flight and how fast it may ask outlive a reload: they are kept by digest in
//! a side table, so that changing a limit neither forgets nor frees anything.
//!
//! Rate: the generic cell rate algorithm (ITU-T I.371): a request is due `60 s / rate` after the one
//! before it; up to [`BURST`] worth of due times may be ahead of the clock. Exact, two words per key,
//! no timer.
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

/// What a key has used; outlives reloads.
#[derive(Debug, Default)]
struct Usage {
    in_flight: AtomicU32,
    /// When the next request is due, if the key has a rate.
    due: Mutex<Option<Instant>>,
}

/// The usage of every key, across reloads.
#[derive(Debug, Default)]
pub struct KeyUsage(DashMap<[u8; 32], Arc<Usage>>);

/// The keys of one configuration.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: Vec<(Key, Arc<Usage>)>,
    by_digest: HashMap<[u8; 32], usize>,
}

/// Why a key does not open the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// None was sent.
    Missing,
    /// It is not one of ours.
    Unknown,
}

/// A limit of the key itself, and when to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit(pub Duration);

/// A key that was recognised.
#[derive(Clone, Copy, Debug)]
pub struct ApiKey<'a> {
    key: &'a Key,
    usage: &'a Arc<Usage>,
}

/// One request of a key in flight; counts until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Usage>);

impl Keyring {
    /// The keys of `auth`, with the usage they had before.
    pub fn new(auth: &Auth, usage: &KeyUsage) -> Self {
        let keys: Vec<_> = auth
            .keys
            .iter()
            .map(|key| (key.clone(), Arc::clone(&usage.0.entry(*key.sha256.bytes()).or_default())))
            .collect();
        usage.0.retain(|digest, used| {
            keys.iter().any(|(key, _)| key.sha256.bytes() == digest) || used.in_flight.load(Ordering::Relaxed) > 0
        });
        let by_digest = keys.iter().enumerate().map(|(index, (key, _))| (*key.sha256.bytes(), index)).collect();
        Self { keys, by_digest }
    }

    /// Whether the gateway asks for a key at all.
    pub fn is_open(&self) -> bool {
        self.keys.is_empty()
    }

    /// Recognises the key a client sent.
    pub fn recognise(&self, sent: Option<&str>) -> Result<ApiKey<'_>, KeyError> {
        let sent = sent.ok_or(KeyError::Missing)?;
        let digest: [u8; 32] = Sha256::digest(sent.as_bytes()).into();
        let (key, usage) = self.by_digest.get(&digest).map(|index| &self.keys[*index]).ok_or(KeyError::Unknown)?;
        if bool::from(key.sha256.bytes().ct_eq(&digest)) { Ok(ApiKey { key, usage }) } else { Err(KeyError::Unknown) }
    }
}

impl ApiKey<'_> {
    /// The name of the key, for logs.
    pub fn name(&self) -> &str {
        &self.key.name
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

    /// Counts one request against the key's own limits.
    pub fn begin(&self, now: Instant) -> Result<InFlight, OverLimit> {
        let used = self.usage.in_flight.fetch_add(1, Ordering::AcqRel);
        let counted = InFlight(Arc::clone(self.usage));
        if self.key.limit.in_flight.is_some_and(|limit| used >= limit) {
            return Err(OverLimit(Duration::from_secs(1)));
        }
        if let Some(rate) = self.key.limit.requests_per_minute {
            let interval = Duration::from_secs(60) / rate.max(1);
            let mut due = self.usage.due.lock();
            let next = due.map_or(now, |due| due.max(now));
            let ahead = next.saturating_duration_since(now);
            if ahead > BURST.saturating_sub(interval) && ahead > Duration::ZERO {
                return Err(OverLimit(ahead.saturating_sub(BURST.saturating_sub(interval))));
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

    #[test]
    fn only_the_right_key_is_recognised_and_only_for_its_models() {
        let ring = Keyring::new(&auth(KeyLimit::default()), &KeyUsage::default());
        assert_eq!(ring.recognise(None).unwrap_err(), KeyError::Missing);
        assert_eq!(ring.recognise(Some("Secret")).unwrap_err(), KeyError::Unknown);
        let holder = ring.recognise(Some("secret")).unwrap();
        assert!(holder.may_use(Some(ModelId::new(1))));
        assert!(!holder.may_use(Some(ModelId::new(0))));
        assert!(!holder.may_use(None));
    }

    #[test]
    fn requests_in_flight_are_counted_until_dropped_and_across_a_reload() {
        let usage = KeyUsage::default();
        let limit = KeyLimit { in_flight: Some(1), requests_per_minute: None };
        let now = Instant::now();
        let first = Keyring::new(&auth(limit.clone()), &usage).recognise(Some("secret")).unwrap().begin(now).unwrap();
        let reloaded = Keyring::new(&auth(limit), &usage);
        let holder = reloaded.recognise(Some("secret")).unwrap();
        assert!(holder.begin(now).is_err());
        drop(first);
        assert!(holder.begin(now).is_ok());
    }

    #[test]
    fn a_rate_allows_a_burst_and_then_its_pace() {
        let limit = KeyLimit { in_flight: None, requests_per_minute: Some(60) };
        let ring = Keyring::new(&auth(limit), &KeyUsage::default());
        let holder = ring.recognise(Some("secret")).unwrap();
        let start = Instant::now();
        let at_once = (0..100).take_while(|_| holder.begin(start).is_ok()).count();
        assert_eq!(at_once, 10);
        assert_eq!(holder.begin(start).unwrap_err(), OverLimit(Duration::from_secs(1)));
        assert!(holder.begin(start + Duration::from_secs(1)).is_ok());
        assert!(holder.begin(start + Duration::from_secs(1)).is_err());
    }
}
