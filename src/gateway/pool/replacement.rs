//! May a backend leave service: can the other backends carry the load?
//!
//! Other backends are the ones in rotation in the backend's pool and in the pools that the requests
//! may spill to. They must serve every model and adapter of the backend. All running and waiting
//! requests of these pools, the backend's own included, must fit into the share `headroom` of the
//! slots of the other backends.

use super::view::{BackendView, PoolView};

/// Why a backend cannot leave service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Irreplaceable {
    /// Only this backend serves these models.
    #[error(
        "no other backend in rotation serves {0}; add one, or restart with --hold: requests then wait, as long as the \
         pool's queue allows"
    )]
    Unserved(String),
    /// The other backends have too little room.
    #[error(
        "without it {used} of {room} slots would be in use, more than fleet.headroom ({headroom_percent} %) allows; try \
         again with less load, or restart with --hold"
    )]
    NoRoom {
        /// Slots in use plus requests that wait, of all pools concerned.
        used: u64,
        /// Slots of the other backends.
        room: u64,
        /// The share of the slots that may be in use.
        headroom_percent: u32,
    },
}

/// A backend that is about to leave service.
#[derive(Clone, Debug)]
pub struct Replacement<'a> {
    /// The pool of the backend.
    pub pool: &'a str,
    /// The backend.
    pub backend: &'a str,
    /// Pools that the requests may spill to.
    pub spill: Vec<&'a str>,
    /// The share of the other backends' slots that may be in use afterwards.
    pub headroom: f64,
}

impl Replacement<'_> {
    /// Checks that other backends can carry the load. `names`: the models of a backend.
    ///
    /// # Errors
    /// The models that they do not serve, or how full they are.
    pub fn check(&self, views: &[PoolView], names: impl Fn(&BackendView) -> Vec<String>) -> Result<(), Irreplaceable> {
        let reachable = |view: &&PoolView| *view.name == *self.pool || self.spill.contains(&&*view.name);
        let mut others = Vec::new();
        let (mut missing, mut used) = (Vec::new(), 0u64);
        for view in views.iter().filter(reachable) {
            used += view.queue_length as u64;
            for backend in &view.backends {
                used += u64::from(backend.used.slots);
                if *view.name == *self.pool && *backend.name == *self.backend {
                    missing = names(backend);
                } else if backend.in_rotation() {
                    others.push(backend);
                }
            }
        }
        let served: Vec<String> = others.iter().flat_map(|other| names(other)).collect();
        missing.retain(|name| !served.contains(name));
        if others.is_empty() || !missing.is_empty() {
            let names = if missing.is_empty() { "its requests".to_owned() } else { missing.join(", ") };
            return Err(Irreplaceable::Unserved(names));
        }
        let room: u64 = others.iter().map(|other| u64::from(other.limits.slots)).sum();
        if used as f64 > room as f64 * self.headroom {
            let headroom_percent = (self.headroom * 100.0).round() as u32;
            return Err(Irreplaceable::NoRoom { used, room, headroom_percent });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use crate::config::{Endpoint, Policy};
    use crate::pool::*;

    /// Two pools with two ready backends each, and the ids of the backends.
    fn pools(slots: u32) -> (Arc<Admission>, PoolLayout) {
        let limits = BackendLimits { slots, tokens: None, prefill_tokens: None, long_prefix: None };
        let second = std::time::Duration::from_secs(1);
        let rules = HealthRules {
            probe_failures: 1,
            request_failures: 1,
            eject_base: second,
            eject_max: second,
            max_ejected: 0.5,
        };
        let spec = |name: &str, base: u16| PoolSpec {
            name: name.into(),
            rules: PoolRules {
                policy: Policy::LeastWork,
                limits,
                queue_length: 8,
                queue_timeout: second,
                hold: None,
                order: QueueOrder::FIFO,
                by_priority: None,
            },
            backends: (base..base + 2)
                .map(|port| {
                    let endpoint = Endpoint { https: false, host: "10.0.0.1".to_owned(), port, prefix: String::new() };
                    let address = Address::new(endpoint, None, None);
                    BackendSpec { name: format!("b{port}").into(), address: Arc::new(address), weight: 1.0 }
                })
                .collect(),
            spill: vec![],
        };
        let now = Instant::now();
        let admission = Admission::new(now, rules, 1);
        let layout = admission.apply(&[spec("one", 1), spec("two", 3)], rules, now);
        for id in layout.backends.iter().flatten() {
            admission.record_probe(*id, true, now);
        }
        (admission, layout)
    }

    fn judge(
        admission: &Admission,
        spill: &[&str],
        names: impl Fn(&BackendView) -> Vec<String>,
    ) -> Result<(), Irreplaceable> {
        let replacement = Replacement { pool: "one", backend: "b1", spill: spill.to_vec(), headroom: 0.5 };
        replacement.check(&admission.view(), names)
    }

    fn same(_: &BackendView) -> Vec<String> {
        vec!["m".to_owned(), "lora".to_owned()]
    }

    #[test]
    fn another_backend_in_rotation_and_in_reach_must_serve_every_name() {
        let (admission, layout) = pools(8);
        assert_eq!(judge(&admission, &[], same), Ok(()));
        let without_lora =
            |view: &BackendView| same(view).into_iter().take(if *view.name == *"b1" { 2 } else { 1 }).collect();
        assert_eq!(judge(&admission, &[], without_lora), Err(Irreplaceable::Unserved("lora".to_owned())));
        admission.set_cordon(layout.backends[0][1], Cordon::Starting);
        assert_eq!(judge(&admission, &[], same), Err(Irreplaceable::Unserved("m, lora".to_owned())));
        assert_eq!(judge(&admission, &["two"], same), Ok(()));
    }

    #[test]
    fn running_and_waiting_requests_must_fit_on_the_other_backends_with_a_margin() {
        let (admission, layout) = pools(4);
        let request = || AdmissionRequest {
            layout: layout.number,
            home: layout.pools[0],
            spill: [].into_iter().collect(),
            need: Need { slots: 1, prompt_tokens: 1, output_tokens: 1 },
            priority: 0,
            fair: None,
            arrived: Instant::now(),
            since: Instant::now(),
            prefix: Default::default(),
            adapter: None,
            asks: Default::default(),
            wants: Default::default(),
            avoid: [].into_iter().collect(),
            only: None,
            pinned: false,
        };
        let mut held = Vec::new();
        for _ in 0..2 {
            let AdmissionDecision::Granted(lease) = admission.enter(request()) else { panic!("there is room") };
            held.push(lease);
        }
        assert_eq!(judge(&admission, &[], same), Ok(()));
        let AdmissionDecision::Granted(_third) = admission.enter(request()) else { panic!("there is room") };
        assert_eq!(judge(&admission, &[], same), Err(Irreplaceable::NoRoom { used: 3, room: 4, headroom_percent: 50 }));
    }
}
