//! Backends to which no gateway may send requests, because one gateway drains or restarts their
//! engines.
//!
//! That gateway writes the closed backends with each renewal. Another gateway that has read them
//! stops sending there before the next write, and a write replaces only a state that was read. So a
//! gateway has no request left there if the beat is higher than at the closing, and the entry shows
//! no slots in use. For silent gateways, [`UNEXPLAINED`](crate::UNEXPLAINED) shows the slots that
//! the engine may still run.
//!
//! A closing is lost with the object, or when a program that does not know the field `closed`
//! writes. Then the gateway writes the closing again.

use std::collections::{BTreeMap, BTreeSet};

use crate::amounts::Unit;
use crate::ledger::{Entry, Ledger, is_gateway};

#[derive(Clone, Debug, Default)]
pub(crate) struct Closing {
    /// By closed backend: the other gateways; `None` while the closing is not written.
    backends: BTreeMap<String, Option<Others>>,
}

/// The other gateways, as far as they concern one closed backend.
#[derive(Clone, Debug)]
struct Others {
    /// Gateways that may not know of the closing, with their beats at the closing.
    unaware: BTreeMap<String, u64>,
    /// Whether any other entry showed slots of the backend in use at the last read.
    run: bool,
}

impl Closing {
    /// Closes exactly these backends from the next write on.
    pub(crate) fn set(&mut self, closed: &BTreeSet<String>) {
        self.backends.retain(|backend, _| closed.contains(backend));
        for backend in closed {
            self.backends.entry(backend.clone()).or_default();
        }
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.backends.keys().cloned().collect()
    }

    pub(crate) fn written(&mut self, own: &str, ledger: &Ledger) {
        let Some(entry) = ledger.gateways.get(own) else { return };
        let others = || ledger.gateways.iter().filter(|(id, _)| **id != own && is_gateway(id));
        for (backend, known) in &mut self.backends {
            if known.is_none() && entry.closed.contains(backend) {
                let unaware = others().map(|(id, entry)| (id.clone(), entry.beat)).collect();
                *known = Some(Others { unaware, run: true });
            }
        }
    }

    pub(crate) fn read(&mut self, own: &str, ledger: Option<&Ledger>) {
        let entries = || ledger.iter().flat_map(|ledger| &ledger.gateways);
        for (backend, known) in &mut self.backends {
            let stands = entries().any(|(id, entry)| id == own && entry.closed.contains(backend));
            let Some(others) = known.as_mut().filter(|_| stands) else {
                *known = None;
                continue;
            };
            let beat = |id: &String| ledger.and_then(|ledger| ledger.gateways.get(id)).map(|entry| entry.beat);
            others.unaware.retain(|id, before| beat(id).is_some_and(|beat| beat <= *before));
            let runs = |entry: &Entry| entry.backends.get(backend).is_some_and(|held| held.used.get(Unit::Slots) > 0);
            others.run = entries().any(|(id, entry)| id != own && runs(entry));
        }
    }

    pub(crate) fn left(&self) -> BTreeSet<String> {
        let has_left = |others: &Others| others.unaware.is_empty() && !others.run;
        let left = self.backends.iter().filter(|(_, others)| others.as_ref().is_some_and(has_left));
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
        let mut left_after = |write: bool, entries: &[(&str, u64, u64, &[&str])]| {
            let ledger = ledger(entries);
            if write {
                closing.written("own", &ledger)
            } else {
                closing.read("own", Some(&ledger))
            }
            closing.left().len()
        };
        assert_eq!(left_after(false, &[own, ("b", 7, 0, &[])]), 0, "it is not written");
        let all = [own, ("b", 7, 0, &[]), ("c", 2, 0, &[]), ("#earlier", 1, 0, &[])];
        assert_eq!(left_after(true, &all), 0, "neither has seen it");
        assert_eq!(left_after(false, &all), 0, "neither has seen it");
        assert_eq!(left_after(false, &[own, ("b", 8, 0, &[]), ("c", 3, 1, &[])]), 0, "c has a request there");
        // Gateway c is silent. Gateway d joined after the closing and knew of it.
        let mut gone = vec![own, ("b", 8, 0, &[][..]), ("d", 1, 0, &[][..])];
        assert_eq!(
            left_after(false, &[&gone[..], &[("#unexplained", 1, 1, &[])]].concat()),
            0,
            "the engine may run it"
        );
        assert_eq!(left_after(false, &gone), 1);
        gone[1].2 = 1;
        assert_eq!(left_after(false, &gone), 0, "b was away, and has a request there");
        gone[1].2 = 0;
        assert_eq!(left_after(false, &gone), 1);
        gone[0].3 = &[];
        assert_eq!(left_after(false, &gone), 0, "another program has written what it does not know");
        closing.written("own", &ledger(&[own]));
        closing.read("own", Some(&ledger(&[own])));
        assert_eq!(closing.left().len(), 1, "there is no other gateway");
        closing.read("own", None);
        assert!(closing.left().is_empty(), "the object is lost");
    }

    #[test]
    fn one_that_is_closed_again_is_waited_for_again() {
        let mut closing = Closing::default();
        let all: BTreeSet<String> = ["p/a".to_owned()].into();
        for beat in [7, 9] {
            closing.set(&all);
            assert_eq!((closing.names(), closing.left()), (all.clone(), BTreeSet::new()));
            closing.written("own", &ledger(&[("own", beat, 0, &["p/a"]), ("b", beat, 0, &[])]));
            closing.read("own", Some(&ledger(&[("own", beat, 0, &["p/a"]), ("b", beat + 1, 0, &[])])));
            assert_eq!(closing.left(), all);
            closing.set(&BTreeSet::new());
        }
    }
}
