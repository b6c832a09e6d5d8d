//! The settings that are tried on the worst period: those of the scenario, or what is most often worth a try.
//!
//! Settings that do not fit the configuration (a number of engines where there are several pools) are left out. Bounds:
//! [`VARIANTS`] settings, permits in [`POOLS`] pools.

use std::collections::BTreeMap;

use crate::config::ArgValue;
use crate::lab::{Scenario, Variant};

/// Settings that are tried, at most.
const VARIANTS: usize = 12;
/// Pools that get a permit, at most.
const POOLS: usize = 16;

/// The variants of the file, or as it was and others. The first is what was.
pub(super) fn variants(scenario: &Scenario) -> Vec<Variant> {
    if !scenario.file.variant.is_empty() {
        return scenario.file.variant.iter().take(VARIANTS).cloned().collect();
    }
    let as_it_was = Variant { name: "as it was, simulated".to_owned(), ..Variant::default() };
    // The simulation says what is wrong.
    let Ok(lab) = scenario.lab(&as_it_was) else { return vec![as_it_was] };
    let engines: usize = lab.config.pools.iter().map(|pool| pool.backends.len()).sum();
    let fits = |variant: &Variant| scenario.lab(variant).is_ok();
    let pools = lab.config.pools.iter().take(POOLS);
    let permits = pools.map(|pool| format!("pool.{}.long_prefix={{threshold=\"5k\",slots=1}}", pool.name));
    let permits = permits.filter(|set| fits(&Variant { set: vec![set.clone()], ..Variant::default() }));
    let mut all = vec![Variant {
        name: "one prefill permit for prompts over 5k".to_owned(),
        set: permits.collect(),
        ..Variant::default()
    }];
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
