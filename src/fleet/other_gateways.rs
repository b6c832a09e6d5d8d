//! Other gateways before the same engines: they take part in a planned stop of an engine.
//!
//! A gateway that drains an engine *closes* it for the other gateways, and stops it only when they
//! have left it. The engine stays closed while it is stopped and starts, until it serves again or
//! is given up. An engine that crashed or was taken over is not closed: each gateway's probes show
//! the state. Without other gateways, no stop waits.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use sluice_gateway::pool::Cordon;

/// Engines that are closed for other gateways, and closed engines that they have left.
#[derive(Debug, Default)]
pub struct OtherGateways(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `pool/backend`.
    closed: BTreeSet<String>,
    /// The closed engines that the others have left; `None`: there are no other gateways.
    left: Option<BTreeSet<String>>,
}

impl OtherGateways {
    /// Closes or opens an engine of this gateway after a change of the cordon.
    pub(crate) fn follow(&self, backend: &str, cordon: Cordon) {
        match cordon {
            // A resting pod may run on, because a StatefulSet removes pods with higher numbers
            // first.
            Cordon::Draining | Cordon::Idle => self.close(backend),
            Cordon::Starting => {}
            Cordon::Open | Cordon::Down => self.open(backend),
        }
    }

    /// Other gateways must not send requests to this backend.
    pub fn close(&self, backend: &str) {
        let mut state = self.0.lock();
        // An earlier report that the others have left the backend does not count now.
        if state.closed.insert(backend.to_owned())
            && let Some(left) = &mut state.left
        {
            left.remove(backend);
        }
    }

    /// Other gateways may send requests there again, if their probes succeed.
    pub fn open(&self, backend: &str) {
        self.0.lock().closed.remove(backend);
    }

    /// Opens all backends, because this gateway does nothing more to engines.
    pub fn open_all(&self) {
        self.0.lock().closed.clear();
    }

    /// The backends that are closed.
    pub fn closed(&self) -> BTreeSet<String> {
        self.0.lock().closed.clone()
    }

    /// Records a report that other gateways have no requests on these closed backends, and start
    /// none.
    pub fn note(&self, left: BTreeSet<String>) {
        self.0.lock().left = Some(left);
    }

    /// Whether other gateways have been seen.
    pub(crate) fn exist(&self) -> bool {
        self.0.lock().left.is_some()
    }

    /// Whether no other gateway has a request on this backend, or sends one while it is closed.
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
