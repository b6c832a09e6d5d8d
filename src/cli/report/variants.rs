//! The settings that are tried on the worst period: the scenario's, or the most promising ones.
//!
//! The gateway's limits come first, because they cost nothing; then flags of engines, then more
//! engines. Settings that do not fit the configuration, such as a number of engines with several
//! pools, are left out. Bounds: [`VARIANTS`] settings; limits and permits in [`POOLS`] pools.

use std::collections::BTreeMap;

use sluice_config::{ArgValue, Pool};
use sluice_lab::{Scenario, Variant};

const VARIANTS: usize = 12;
const POOLS: usize = 16;

/// vLLM's default of `max-num-seqs`. Fewer slots hold back requests that an engine could run.
const ENGINE_SLOTS: u32 = 256;
const FACTORS: [u32; 2] = [2, 8];
const SLOTS_MAX: u32 = 65_536;

/// Settings that raise the limits of a pool, if limits could hold requests back.
fn raised(pool: &Pool, factor: u32) -> Vec<String> {
    let set = |key: &str, value: u64| format!("pool.{}.{key}={value}", pool.name);
    let mut sets = Vec::new();
    if pool.slots < ENGINE_SLOTS {
        sets.push(set("slots", u64::from(pool.slots.saturating_mul(factor).min(SLOTS_MAX))));
    }
    for (key, limit) in [("tokens", pool.tokens.fixed()), ("prefill_tokens", pool.prefill_tokens)] {
        sets.extend(limit.map(|limit| set(key, limit.0.saturating_mul(u64::from(factor)))));
    }
    sets
}

/// The variants of the file, or the recorded settings and then others.
pub(super) fn variants(scenario: &Scenario) -> Vec<Variant> {
    if !scenario.file.variant.is_empty() {
        return scenario.file.variant.iter().take(VARIANTS).cloned().collect();
    }
    let as_it_was = Variant { name: "as it was, simulated".to_owned(), ..Variant::default() };
    let Ok(lab) = scenario.lab(&as_it_was) else { return vec![as_it_was] };
    let engines: usize = lab.config.pools.iter().map(|pool| pool.backends.len()).sum();
    let fits = |variant: &Variant| scenario.lab(variant).is_ok();
    let pools = lab.config.pools.iter().take(POOLS);
    let permits = pools.map(|pool| format!("pool.{}.long_prefix={{threshold=\"5k\",slots=1}}", pool.name));
    let permits = permits.filter(|set| fits(&Variant { set: vec![set.clone()], ..Variant::default() }));
    let mut all: Vec<Variant> = Vec::new();
    for factor in FACTORS {
        let set: Vec<String> = lab.config.pools.iter().take(POOLS).flat_map(|pool| raised(pool, factor)).collect();
        let shown = set.iter().map(|set| set.trim_start_matches("pool.")).collect::<Vec<_>>().join(", ");
        let name = if set.len() <= 2 {
            format!("the gateway's limits: {shown}")
        } else {
            format!("{factor} times the gateway's limits")
        };
        all.push(Variant { name, set, ..Variant::default() });
    }
    all.push(Variant {
        name: "one prefill permit for prompts over 5k".to_owned(),
        set: permits.collect(),
        ..Variant::default()
    });
    all.retain(|variant| !variant.set.is_empty());
    for (name, value) in
        [("long-prefill-token-threshold", 256), ("max-num-batched-tokens", 8_192), ("max-num-seqs", 512)]
    {
        let args = BTreeMap::from([(name.to_owned(), ArgValue::Int(value))]);
        all.push(Variant { name: format!("{name} {value}"), args, ..Variant::default() });
    }
    for more in [1, 2] {
        let name = format!("{more} more engine{}", if more == 1 { "" } else { "s" });
        all.push(Variant { name, count: u32::try_from(engines + more).ok(), ..Variant::default() });
    }
    all.retain(fits);
    all.insert(0, as_it_was);
    all
}
