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
        /// The percentage of these slots that may be in use.
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
    /// # Errors The models that the other backends do not serve, or how full these backends are.
    pub fn check(&self, views: &[PoolView], names: impl Fn(&BackendView) -> Vec<String>) -> Result<(), Irreplaceable> {
        let reachable = |view: &&PoolView| *view.name == *self.pool || self.spill.contains(&&*view.name);
        let mut members = views.iter().filter(|view| *view.name == *self.pool).flat_map(|view| &view.backends);
        let own = members.find(|backend| *backend.name == *self.backend).map(|own| &own.address);
        let mut others = Vec::new();
        let (mut missing, mut used) = (Vec::new(), 0u64);
        for view in views.iter().filter(reachable) {
            used += view.queue_length as u64;
            for backend in &view.backends {
                used += u64::from(backend.used.slots);
                if *view.name == *self.pool && *backend.name == *self.backend {
                    missing = names(backend);
                } else if backend.in_rotation() && !own.is_some_and(|own| own.is_same_server(&backend.address)) {
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
