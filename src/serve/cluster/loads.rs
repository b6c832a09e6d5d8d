//! The load of pools at other gateways, so that the scaler of one gateway counts the requests of
//! all.
//!
//! Each gateway writes sums since its start, so a missed read loses nothing. Sums seen for the
//! first time add nothing. Bounds: the gateways of a ledger, times the pools with `autoscale`.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use sluice_cluster::ledger::is_gateway;
use sluice_cluster::{Ledger, PoolLoad};

use sluice_online::observe::tally::Tally;

#[derive(Debug)]
struct Seen {
    latest: PoolLoad,
    taken: Tally,
}

#[derive(Debug, Default)]
pub(crate) struct OtherLoads(Mutex<BTreeMap<(String, String), Seen>>);

/// The load of a pool at all other gateways together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OtherLoad {
    pub(crate) queue: usize,
    pub(crate) in_flight: usize,
    pub(crate) tally: Tally,
}

impl OtherLoads {
    /// Notes the loads in a ledger. `own` is the id of this gateway, whose load is left out.
    pub(crate) fn see(&self, ledger: &Ledger, own: &str) {
        let mut seen = self.0.lock();
        seen.retain(|(id, pool), _| ledger.gateways.get(id).is_some_and(|entry| entry.pools.contains_key(pool)));
        for (id, entry) in ledger.gateways.iter().filter(|(id, _)| *id != own && is_gateway(id)) {
            for (pool, load) in &entry.pools {
                let known = seen.entry((id.clone(), pool.clone()));
                let known = known.or_insert_with(|| Seen { latest: *load, taken: Tally::from_sums(load.ended) });
                known.latest = *load;
            }
        }
    }

    pub(super) fn forget(&self) {
        self.0.lock().clear();
    }

    pub(crate) fn take(&self, pool: &str) -> OtherLoad {
        let mut all = OtherLoad::default();
        for ((_, _), seen) in self.0.lock().iter_mut().filter(|((_, own), _)| own == pool) {
            all.queue += seen.latest.queue as usize;
            all.in_flight += seen.latest.in_flight as usize;
            let ended = Tally::from_sums(seen.latest.ended);
            all.tally.merge(&ended.since(&std::mem::replace(&mut seen.taken, ended)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use sluice_cluster::Entry;

    use super::*;

    fn ledger(loads: &[(&str, PoolLoad)]) -> Ledger {
        let mut ledger = Ledger::parse(br#"{"version":1,"begun":"l","writes":1,"known":[],"gateways":{}}"#).unwrap();
        for (id, load) in loads {
            let pools = [("p".to_owned(), *load)].into();
            ledger.gateways.insert((*id).to_owned(), Entry { pools, ..Entry::default() });
        }
        ledger
    }

    fn load(queue: u64, in_flight: u64, ended: f64) -> PoolLoad {
        PoolLoad { queue, in_flight, ended: [ended, ended, 100.0 * ended, ended, 0.0, 0.0] }
    }

    #[test]
    fn what_ends_at_other_gateways_counts_once_and_what_is_in_flight_as_long_as_they_are_there() {
        let loads = OtherLoads::default();
        loads
            .see(&ledger(&[("own", load(9, 9, 900.0)), ("b", load(1, 4, 50.0)), ("#earlier", load(7, 7, 7.0))]), "own");
        let first = loads.take("p");
        assert_eq!(first, OtherLoad { queue: 1, in_flight: 4, tally: Tally::default() }, "50 had ended before");
        loads.see(&ledger(&[("b", load(0, 5, 60.0)), ("c", load(2, 1, 5.0))]), "own");
        loads.see(&ledger(&[("b", load(0, 6, 70.0)), ("c", load(2, 1, 8.0))]), "own");
        let second = loads.take("p");
        assert_eq!((second.queue, second.in_flight, second.tally.ended), (2, 7, 23.0));
        assert_eq!(second.tally.known, (23.0, 2_300.0));
        assert_eq!(loads.take("p").tally, Tally::default());
        assert_eq!(loads.take("q"), OtherLoad::default());
        loads.see(&ledger(&[("c", load(0, 3, 8.0))]), "own");
        assert_eq!(loads.take("p").in_flight, 3, "b has gone");
    }
}
