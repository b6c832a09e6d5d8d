//! Adds the work that owners have had at other gateways, so that fair queues count the work at all
//! gateways.
//!
//! The growth of other gateways' sums (`sluice_cluster::attained`) counts for the owners of this
//! gateway. A sum seen for the first time adds nothing. A sum that fell has restarted from 0, so
//! all of it is growth.

use std::collections::BTreeMap;

use sluice_cluster::ledger::is_gateway;
use sluice_cluster::{Attained, Ledger};

use sluice_gateway::pool::Admission;

/// The sums at the last count, by gateway, pool and owner.
#[derive(Debug, Default)]
pub(super) struct OthersAttained(BTreeMap<(String, String, u64), u64>);

impl OthersAttained {
    /// Adds the growth since the last ledger. `own` is the id of this gateway, whose sums are left
    /// out.
    pub(super) fn see(&mut self, ledger: &Ledger, own: &str, admission: &Admission) {
        let before = std::mem::take(&mut self.0);
        for (id, entry) in ledger.gateways.iter().filter(|(id, _)| *id != own && is_gateway(id)) {
            for (pool, owners) in &entry.attained {
                for (owner, sum) in owners {
                    let key = (id.clone(), pool.clone(), *owner);
                    let grown = before.get(&key).map_or(0, |known| sum.checked_sub(*known).unwrap_or(*sum));
                    if grown > 0 {
                        admission.attained_elsewhere(pool, *owner, grown as f64 / 1e3);
                    }
                    self.0.insert(key, *sum);
                }
            }
        }
    }
}

pub(super) fn own(admission: &Admission) -> Attained {
    let ms = |(owner, seconds): (u64, f64)| (owner, (seconds * 1e3) as u64);
    let pools = admission.attained().into_iter();
    pools.map(|(pool, owners)| (pool.to_string(), owners.into_iter().map(ms).collect())).collect()
}

#[cfg(test)]
mod tests {
    use sluice_cluster::Entry;
    use tokio::time::Instant;

    use super::*;
    use sluice_gateway::pool::HealthRules;

    fn ledger(sums: &[(&str, u64)]) -> Ledger {
        let mut ledger = Ledger::parse(br#"{"version":1,"begun":"l","writes":1,"known":[],"gateways":{}}"#).unwrap();
        for (id, sum) in sums {
            let attained = [("p".to_owned(), [(7, *sum)].into())].into();
            ledger.gateways.insert((*id).to_owned(), Entry { attained, ..Entry::default() });
        }
        ledger
    }

    #[test]
    fn sums_of_gateways_that_have_gone_are_forgotten_and_own_ones_are_not_counted() {
        let rules = HealthRules {
            probe_failures: 1,
            request_failures: 1,
            eject_base: std::time::Duration::from_secs(1),
            eject_max: std::time::Duration::from_secs(1),
            max_ejected: 0.5,
        };
        let (admission, mut others) = (Admission::new(Instant::now(), rules, 1), OthersAttained::default());
        others.see(&ledger(&[("own", 1), ("b", 2), ("#earlier", 3)]), "own", &admission);
        assert_eq!(others.0.values().copied().collect::<Vec<_>>(), [2]);
        others.see(&ledger(&[("c", 9)]), "own", &admission);
        assert_eq!(others.0.values().copied().collect::<Vec<_>>(), [9]);
        assert!(own(&admission).is_empty());
    }
}
