//! Pools and backends as a configuration describes them to admission, and the ids that admission assigns to them.
//!
//! Plain data, without state. How a new configuration replaces the one before it is in `apply.rs`.
//! Identity: a pool is its name; a backend is its pool, its name and its endpoint.

use std::sync::Arc;
use std::time::Duration;

use super::capacity::BackendLimits;
use super::queue::QueueOrder;
use crate::config::{Endpoint, Policy, Secret};
use crate::tls::ClientTls;
use sluice_core::base::{BackendId, PoolId};

/// The rules of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// How a backend is picked.
    pub policy: Policy,
    /// The limits that apply to each of its backends.
    pub limits: BackendLimits,
    /// Waiters at most.
    pub queue_length: usize,
    /// The longest wait, counted from the request's arrival, or from when it has to be repeated.
    pub queue_timeout: Duration,
    /// The longest wait while no backend is in rotation, where engines are started for requests that wait; `None`: such requests
    /// wait as others do.
    pub hold: Option<Duration>,
    /// The order of waiters.
    pub order: QueueOrder,
    /// Whether its engines schedule by priority; `None`: as each has said
    /// ([`Admission::set_by_priority`]), otherwise not.
    ///
    /// [`Admission::set_by_priority`]: super::Admission::set_by_priority
    pub by_priority: Option<bool>,
}

/// Later arrivals overtake a waiter for at most this part of its queue's timeout, so that it has the rest for its turn.
const OVERTAKEN_SHARE: u32 = 4;

impl PoolRules {
    /// How many requests overtake a waiter at most.
    pub(super) fn overtakers_max(&self) -> u64 {
        self.queue_length as u64
    }

    /// For how long after its arrival later ones may overtake a waiter.
    pub(super) fn overtaken_for(&self) -> Duration {
        self.queue_timeout / OVERTAKEN_SHARE
    }
}

/// One backend as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSpec {
    /// Its name, unique in the pool.
    pub name: Arc<str>,
    /// Where it is reached; its endpoint is part of the backend's identity.
    pub address: Arc<Address>,
    /// Share of new work relative to the other backends of the pool, above 0.
    pub weight: f64,
}

/// Where a backend is reached, in the form the path of a request needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// Host, port and path prefix.
    pub endpoint: Endpoint,
    /// `host:port`, as it goes into a `Host` header.
    pub authority: Arc<str>,
    /// How to connect with TLS; `None`: without.
    pub tls: Option<ClientTls>,
    /// Sent upstream as a bearer token, instead of what the client sent.
    pub api_key: Option<Secret>,
}

/// One pool as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Its rules.
    pub rules: PoolRules,
    /// Its backends.
    pub backends: Vec<BackendSpec>,
    /// Positions (in the list of specs) of the pools that its requests may spill to.
    pub spill: Vec<usize>,
}

/// The ids given to a configuration, position by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolLayout {
    /// Which one it is: grows with every configuration taken over.
    pub number: u64,
    /// One per pool.
    pub pools: Vec<PoolId>,
    /// One list per pool.
    pub backends: Vec<Vec<BackendId>>,
}
