//! Pools and backends as a configuration describes them to admission, and the ids that admission
//! assigns.
//!
//! Plain data without state; `apply.rs` replaces one configuration with the next. The identity of a
//! pool is its name; the identity of a backend is pool, name and endpoint.

use std::sync::Arc;
use std::time::Duration;

use super::capacity::BackendLimits;
use super::queue::QueueOrder;
use sluice_config::{Address, Policy};
use sluice_core::base::{BackendId, PoolId};

/// The rules of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRules {
    /// How a backend is picked.
    pub policy: Policy,
    /// The limits of each backend.
    pub limits: BackendLimits,
    /// The most waiters.
    pub queue_length: usize,
    /// The longest wait, from the arrival of the request, or from when it has to be repeated.
    pub queue_timeout: Duration,
    /// The longest wait while no backend is in rotation, if waiting requests cause the start of an
    /// engine; `None`: such requests wait like others.
    pub hold: Option<Duration>,
    /// The order of waiters.
    pub order: QueueOrder,
    /// Whether the engines schedule by priority; `None`: as the flags of each engine say
    /// ([`Admission::set_by_priority`]), and not if these are unknown.
    ///
    /// [`Admission::set_by_priority`]: super::Admission::set_by_priority
    pub by_priority: Option<bool>,
}

/// Later arrivals overtake a waiter for at most this part (1/4) of the queue's timeout, so that the
/// rest is left for the waiter's turn.
const OVERTAKEN_SHARE: u32 = 4;

impl PoolRules {
    /// How many requests may overtake a waiter.
    pub(super) fn overtakers_max(&self) -> u64 {
        self.queue_length as u64
    }

    /// How long after a waiter's arrival later requests may overtake it.
    pub(super) fn overtaken_for(&self) -> Duration {
        self.queue_timeout / OVERTAKEN_SHARE
    }
}

/// One backend as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSpec {
    /// The name, unique in the pool.
    pub name: Arc<str>,
    /// The address; the endpoint is part of the backend's identity.
    pub address: Arc<Address>,
    /// Share of new work relative to the other backends of the pool, above 0.
    pub weight: f64,
}

/// One pool as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    /// The name.
    pub name: Arc<str>,
    /// The rules.
    pub rules: PoolRules,
    /// The backends.
    pub backends: Vec<BackendSpec>,
    /// Positions (in the list of specs) of the pools to which requests may spill.
    pub spill: Vec<usize>,
}

/// The ids given to a configuration, position by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolLayout {
    /// Number of the layout: grows with every configuration that is taken over.
    pub number: u64,
    /// One per pool.
    pub pools: Vec<PoolId>,
    /// One list per pool.
    pub backends: Vec<Vec<BackendId>>,
}
