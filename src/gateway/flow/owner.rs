//! The owner of a request in a pool with fair queueing: key, user or header, as `queue.fair` says.
//!
//! An owner is a hash of 64 bits, seeded with the digest of the client's key. So no client can find
//! a name that collides with a user of another key, to share or spoil the turn of that user. The
//! hash is the same at every gateway.

use twox_hash::XxHash3_64;

use super::incoming::IncomingRequest;
use super::keys::{ApiKey, Keyring};
use crate::pool::{FairOwner, PoolView};
use sluice_config::Fair;
use sluice_core::openai::RequestView;

/// The owner of a request in a pool with this setting. `None` if the pool has one queue for all, or
/// if the request is a copy.
pub(super) fn owner(fair: &Fair, incoming: &IncomingRequest, view: &RequestView<'_>) -> Option<FairOwner> {
    if incoming.copy_for.is_some() {
        return None;
    }
    let key = incoming.key.as_ref();
    let (seed, weight) = (key.map_or(0, ApiKey::owner_id), key.map_or(1.0, |key| key.key.weight));
    let named = |name: &[u8]| FairOwner::new(XxHash3_64::oneshot_with_seed(seed, name), weight);
    match fair {
        Fair::Off => None,
        Fair::Key => Some(FairOwner::new(seed, weight)),
        Fair::User => {
            let user = named(view.user.as_deref().unwrap_or_default().as_bytes());
            Some(if key.is_some() { user.of_group(seed) } else { user })
        }
        Fair::Header(name) => Some(named(incoming.headers.get(name).map(|value| value.as_bytes()).unwrap_or_default())),
    }
}

/// The engine time and the waiting requests of a key in a fair pool.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyWork {
    /// The pool.
    pub pool: String,
    /// The name of the key.
    pub key: String,
    /// Seconds of engine time since the key was last without requests for a while.
    pub seconds: f64,
    /// Number of waiting requests.
    pub waiting: usize,
}

impl ApiKey {
    /// The id of the key in fair queues: the first 8 bytes of the key's digest, which clients
    /// without the key do not know.
    fn owner_id(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = *self.key.sha256.bytes();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl Keyring {
    /// The engine time and the waiting requests of keys, in the pools with fair queues by key.
    pub fn work(&self, pools: &[PoolView]) -> Vec<KeyWork> {
        let mut work = Vec::new();
        if pools.iter().all(|pool| pool.owners.is_empty()) {
            return work;
        }
        for key in self.0.values() {
            let id = key.owner_id();
            let own = |pool: &PoolView| {
                let owner = pool.owners.iter().find(|owner| owner.id == id)?;
                let (pool, key) = (pool.name.to_string(), key.name().to_string());
                Some(KeyWork { pool, key, seconds: owner.work, waiting: owner.waiting })
            };
            work.extend(pools.iter().filter_map(own));
        }
        work.sort_by(|one, other| (&one.pool, &one.key).cmp(&(&other.pool, &other.key)));
        work
    }
}
