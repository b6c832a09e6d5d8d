//! Other gateways before the same engines: an engine is stopped in order only when they have stopped sending requests to it.
//!
//! An engine that this gateway drains is *closed* from then on until it serves again or is given up: also while it is stopped and starts.
//! One that has crashed, or that a gateway takes over, is not: probes of each gateway say what it is good for.
//!
//! Where there are no other gateways, nothing waits for them.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use sluice_gateway::pool::Cordon;

/// See the header of this file.
#[derive(Debug, Default)]
pub struct OtherGateways(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `pool/backend`.
    closed: BTreeSet<String>,
    /// Those of them that the others have left; `None`: there are no other gateways.
    left: Option<BTreeSet<String>>,
}

impl OtherGateways {
    /// An engine of this gateway has this cordon now.
    pub(crate) fn follow(&self, backend: &str, cordon: Cordon) {
        match cordon {
            // One that rests may run until it is stopped: its pod goes when those with higher numbers are empty, too.
            Cordon::Draining | Cordon::Idle => self.close(backend),
            Cordon::Starting => {}
            Cordon::Open | Cordon::Down => self.open(backend),
        }
    }

    /// The other gateways shall send no requests to this backend.
    pub fn close(&self, backend: &str) {
        let mut state = self.0.lock();
        // What was said of it before does not hold for this time.
        if state.closed.insert(backend.to_owned())
            && let Some(left) = &mut state.left
        {
            left.remove(backend);
        }
    }

    /// They may send requests there again, as far as their probes say so.
    pub fn open(&self, backend: &str) {
        self.0.lock().closed.remove(backend);
    }

    /// This gateway does nothing more to engines.
    pub fn open_all(&self) {
        self.0.lock().closed.clear();
    }

    /// The backends that are closed.
    pub fn closed(&self) -> BTreeSet<String> {
        self.0.lock().closed.clone()
    }

    /// There are other gateways. To these of the closed backends they send nothing any more, and nothing of theirs runs there.
    pub fn note(&self, left: BTreeSet<String>) {
        self.0.lock().left = Some(left);
    }

    /// Whether no other gateway has a request on this backend, or will have while it is closed.
    pub fn have_left(&self, backend: &str) -> bool {
        self.0.lock().left.as_ref().is_none_or(|left| left.contains(backend))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drained_stays_closed_while_it_rests_and_starts_until_it_serves_or_is_given_up() {
        let others = OtherGateways::default();
        for cordon in [Cordon::Draining, Cordon::Idle, Cordon::Starting] {
            others.follow("p/a", cordon);
            assert!(others.closed().contains("p/a"), "{cordon:?}");
        }
        for cordon in [Cordon::Open, Cordon::Down] {
            others.close("p/a");
            others.follow("p/a", cordon);
            assert!(others.closed().is_empty(), "{cordon:?}");
        }
        others.follow("p/a", Cordon::Idle);
        assert!(others.closed().contains("p/a"), "one that another gateway has stopped");
    }

    #[test]
    fn what_was_left_once_is_waited_for_again_when_it_is_closed_again() {
        let others = OtherGateways::default();
        others.close("p/a");
        assert!(others.have_left("p/a"), "there are none");
        others.note(BTreeSet::new());
        assert!(!others.have_left("p/a"));
        others.note(["p/a".to_owned()].into());
        assert!(others.have_left("p/a"));
        others.open("p/a");
        others.close("p/a");
        assert_eq!((others.have_left("p/a"), others.closed().len()), (false, 1));
        others.open_all();
        assert!(others.closed().is_empty());
    }
}
