//! Translates a configuration into the types of [`pool`](crate::pool), which `serve` applies to
//! admission.
//!
//! Admission knows no file, key or default. It gets limits, order, weight and address per pool, in
//! the order of the configuration. The functions are pure. Every valid configuration has a
//! translation, so nothing fails here.

use std::sync::Arc;
use std::time::Duration;

use super::routing_table::limits_of;
use crate::pool::{BackendSpec, HealthRules, PoolRules, PoolSpec, QueueOrder};
use sluice_config::{Address, Config, Order as ConfiguredOrder, SchedulingPolicy, Target};

/// The pools of a configuration.
pub fn pools(config: &Config) -> Vec<PoolSpec> {
    config.pools.iter().map(|own| pool(own, &config.fleet)).collect()
}

/// The health rules of a configuration.
pub fn health_rules(health: &sluice_config::Health) -> HealthRules {
    HealthRules {
        probe_failures: health.failures,
        request_failures: health.failures,
        eject_base: health.ejection_base,
        eject_max: health.ejection_max,
        max_ejected: health.max_ejected,
    }
}

/// How long requests wait while no engine of the pool runs; `None`: they do not wait.
fn hold(pool: &sluice_config::Pool, fleet: &sluice_config::Fleet) -> Option<Duration> {
    let takes_turns = |backend: &sluice_config::Backend| match &backend.target {
        Target::Launch(launch) => launch.share.is_some(),
        Target::Url(_) | Target::Control(..) | Target::Pod(..) => false,
    };
    let for_first = pool.autoscale.filter(|autoscale| autoscale.min == 0).map(|autoscale| autoscale.hold);
    for_first.or_else(|| pool.backends.iter().any(takes_turns).then_some(fleet.share_hold))
}

fn pool(pool: &sluice_config::Pool, fleet: &sluice_config::Fleet) -> PoolSpec {
    PoolSpec {
        name: pool.name.as_str().into(),
        rules: PoolRules {
            policy: pool.policy,
            limits: limits_of(pool),
            queue_length: pool.queue.length,
            queue_timeout: pool.queue.timeout,
            hold: hold(pool, fleet),
            order: order(&pool.queue),
            by_priority: pool.scheduling_policy.map(|policy| policy == SchedulingPolicy::Priority),
        },
        backends: pool.backends.iter().map(backend).collect(),
        spill: pool.spill.iter().map(|pool| pool.index()).collect(),
    }
}

fn order(queue: &sluice_config::Queue) -> QueueOrder {
    match queue.order {
        ConfiguredOrder::Fifo => QueueOrder::FIFO,
        ConfiguredOrder::ShortestFirst => {
            QueueOrder { aging_per_token: Duration::from_nanos(queue.aging_per_1k_tokens.as_nanos() as u64 / 1_000) }
        }
    }
}

fn backend(backend: &sluice_config::Backend) -> BackendSpec {
    BackendSpec { name: backend.name.as_str().into(), address: Arc::new(Address::of(backend)), weight: backend.weight }
}
