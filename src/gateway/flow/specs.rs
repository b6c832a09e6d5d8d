//! Translates a configuration into the types of [`pool`](crate::pool), which `serve` applies to
//! admission.
//!
//! Admission knows no file, key or default. It gets limits, order, weight and address per pool, in
//! the order of the configuration. Pure. Every valid configuration has a translation, so nothing
//! fails here.

use std::sync::Arc;
use std::time::Duration;

use super::routing_table::limits_of;
use crate::config::{self, Config, Order as ConfiguredOrder, SchedulingPolicy};
use crate::pool::{Address, BackendSpec, HealthRules, PoolRules, PoolSpec, QueueOrder};

/// The pools of a configuration.
pub fn pools(config: &Config) -> Vec<PoolSpec> {
    config.pools.iter().map(pool).collect()
}

/// The health rules of a configuration.
pub fn health_rules(health: &config::Health) -> HealthRules {
    HealthRules {
        probe_failures: health.failures,
        request_failures: health.failures,
        eject_base: health.ejection_base,
        eject_max: health.ejection_max,
        max_ejected: health.max_ejected,
    }
}

fn pool(pool: &config::Pool) -> PoolSpec {
    PoolSpec {
        name: pool.name.as_str().into(),
        rules: PoolRules {
            policy: pool.policy,
            limits: limits_of(pool),
            queue_length: pool.queue.length,
            queue_timeout: pool.queue.timeout,
            hold: pool.autoscale.filter(|autoscale| autoscale.min == 0).map(|autoscale| autoscale.hold),
            order: order(&pool.queue),
            by_priority: pool.scheduling_policy.map(|policy| policy == SchedulingPolicy::Priority),
        },
        backends: pool.backends.iter().map(backend).collect(),
        spill: pool.spill.iter().map(|pool| pool.index()).collect(),
    }
}

fn order(queue: &config::Queue) -> QueueOrder {
    match queue.order {
        ConfiguredOrder::Fifo => QueueOrder::FIFO,
        ConfiguredOrder::ShortestFirst => {
            QueueOrder { aging_per_token: Duration::from_nanos(queue.aging_per_1k_tokens.as_nanos() as u64 / 1_000) }
        }
    }
}

fn backend(backend: &config::Backend) -> BackendSpec {
    BackendSpec { name: backend.name.as_str().into(), address: Arc::new(address(backend)), weight: backend.weight }
}

/// The address of a backend and the means of connecting to it.
pub fn address(backend: &config::Backend) -> Address {
    Address::new(backend.target.endpoint(), backend.connection.clone(), backend.api_key.clone())
}
