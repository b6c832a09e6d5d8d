//! Backends to which no gateway shall send requests, because the one that runs their engines drains or starts them.
//!
//! A gateway writes them with its renewal. Another one that reads them sends nothing more there before it writes its next renewal,
//! and a write is only possible over the state that was read. So it has stopped if its beat is larger than in the state in which the
//! backend was closed first, and nothing of its own runs there any more if that entry says so. A gateway that is gone, or was
//! taken for gone, has no entry.

use std::collections::{BTreeMap, BTreeSet};

use crate::amounts::Unit;
use crate::ledger::{Ledger, is_gateway};

/// What one gateway has closed, and who may still send requests there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Closing {
    /// By backend: the others that were there when that was written, with their beats; `None`: it is not written yet.
    backends: BTreeMap<String, Option<BTreeMap<String, u64>>>,
}

impl Closing {
    /// From the next write on exactly these are closed.
    pub(crate) fn set(&mut self, closed: &BTreeSet<String>) {
        self.backends.retain(|backend, _| closed.contains(backend));
        for backend in closed {
            self.backends.entry(backend.clone()).or_default();
        }
    }

    /// What to write.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.backends.keys().cloned().collect()
    }

    /// This was written.
    pub(crate) fn written(&mut self, own: &str, ledger: &Ledger) {
        let Some(entry) = ledger.gateways.get(own) else { return };
        let others = || ledger.gateways.iter().filter(|(id, _)| **id != own && is_gateway(id));
        let new =
            self.backends.iter_mut().filter(|(backend, others)| others.is_none() && entry.closed.contains(*backend));
        for (_, known) in new {
            *known = Some(others().map(|(id, entry)| (id.clone(), entry.beat)).collect());
        }
    }

    /// This was read.
    pub(crate) fn read(&mut self, ledger: &Ledger) {
        for (backend, others) in &mut self.backends {
            let sends = |id: &String, beat: &mut u64| {
                ledger.gateways.get(id).is_some_and(|entry| {
                    let runs = entry.backends.get(backend).is_some_and(|holding| holding.used.get(Unit::Slots) > 0);
                    entry.beat <= *beat || runs
                })
            };
            if let Some(others) = others {
                others.retain(sends);
            }
        }
    }

    /// The closed backends to which no other gateway sends requests, and of which none has one running.
    pub(crate) fn left(&self) -> BTreeSet<String> {
        let left = self.backends.iter().filter(|(_, others)| others.as_ref().is_some_and(BTreeMap::is_empty));
        left.map(|(backend, _)| backend.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, Holding};

    fn ledger(entries: &[(&str, u64, u64, &[&str])]) -> Ledger {
        let mut ledger = Ledger::new("l".to_owned());
        for (id, beat, used, closed) in entries {
            let mut holding = Holding::default();
            holding.used.set(Unit::Slots, *used);
            let backends = [("p/a".to_owned(), holding)].into();
            let closed = closed.iter().map(|&name| name.to_owned()).collect();
            let entry = Entry { beat: *beat, backends, closed, ..Entry::default() };
            ledger.gateways.insert((*id).to_owned(), entry);
        }
        ledger
    }

    #[test]
    fn a_backend_is_left_when_every_other_gateway_has_seen_it_closed_and_has_nothing_there() {
        let mut closing = Closing::default();
        closing.set(&["p/a".to_owned()].into());
        let own = ("own", 5, 3, &["p/a"][..]);
        closing.read(&ledger(&[own, ("b", 7, 0, &[])]));
        assert!(closing.left().is_empty(), "it is not written");
        closing.written("own", &ledger(&[own, ("b", 7, 0, &[]), ("c", 2, 1, &[]), ("#earlier", 1, 0, &[])]));
        closing.read(&ledger(&[own, ("b", 7, 0, &[]), ("c", 2, 1, &[])]));
        assert!(closing.left().is_empty(), "neither has seen it");
        closing.read(&ledger(&[own, ("b", 8, 0, &[]), ("c", 3, 1, &[])]));
        assert!(closing.left().is_empty(), "c has a request there");
        // d came later: it knew it before it sent anything. c is gone.
        closing.read(&ledger(&[own, ("b", 8, 0, &[]), ("d", 1, 0, &[])]));
        assert_eq!(closing.left(), ["p/a".to_owned()].into());
    }

    #[test]
    fn one_that_is_closed_again_is_waited_for_again() {
        let mut closing = Closing::default();
        let all: BTreeSet<String> = ["p/a".to_owned()].into();
        for beat in [7, 9] {
            closing.set(&all);
            assert_eq!((closing.names(), closing.left()), (all.clone(), BTreeSet::new()));
            closing.written("own", &ledger(&[("own", beat, 0, &["p/a"]), ("b", beat, 0, &[])]));
            closing.read(&ledger(&[("b", beat + 1, 0, &[])]));
            assert_eq!(closing.left(), all);
            closing.set(&BTreeSet::new());
        }
    }
}
