//! `prefix = "events"`: the ports of the engines' KV events, and the rules about them.
//!
//! Each data-parallel rank publishes on a port of its own: the port of the server plus the rank, as
//! vLLM does. Two engines cannot have one stream of events, so a host and port may occur once.

use std::collections::BTreeMap;

use super::backend::{Backend, Target};
use super::pool::{Policy, Pool, PrefixMemory};
use super::problem::Situation;
use super::report::Report;
use sluice_core::engines::EngineKind;

/// The port of vLLM's default endpoint.
const PORT: u16 = 5557;
/// The flag with which vLLM publishes events.
const FLAGS: [&str; 2] = ["kv-events-config", "kv_events_config"];

/// The port on which a backend's events come; `None`: the pool uses no events.
pub(super) fn port(memory: PrefixMemory, backend: &Backend) -> Option<u16> {
    (memory == PrefixMemory::Events)
        .then(|| backend.events_port.unwrap_or(PORT).saturating_add(backend.rank.unwrap_or(0)))
}

/// Checks the pools that use events.
pub(super) fn check(pools: &[Pool], report: &mut Report<'_>) {
    let mut first: BTreeMap<(String, u16), String> = BTreeMap::new();
    for (index, pool) in pools.iter().enumerate().filter(|(_, pool)| pool.prefix == PrefixMemory::Events) {
        if *pool.engine != EngineKind::Vllm || pool.policy != Policy::LeastWork {
            report.add_at(&format!("pool[{index}].prefix"), Situation::EventsOfPool);
            continue;
        }
        for (number, backend) in pool.backends.iter().enumerate() {
            let path = format!("pool[{index}].backend[{number}]");
            let Some(port) = backend.events else { continue };
            let publishes = |args: &BTreeMap<String, _>| FLAGS.iter().any(|flag| args.contains_key(*flag));
            if let Target::Launch(launch) = &backend.target
                && !publishes(&launch.args)
                && !backend.follows()
            {
                report.add_at(&format!("{path}.launch"), Situation::EventsOfLaunch { port });
            }
            let host = backend.target.endpoint().host;
            match first.get(&(host.clone(), port)) {
                _ if host.is_empty() => {}
                Some(first) => {
                    report.add_at(&format!("{path}.events_port"), Situation::SameEvents { first: first.clone() });
                }
                None => {
                    first.insert((host, port), format!("{}/{}", pool.name, backend.name));
                }
            }
        }
    }
}
