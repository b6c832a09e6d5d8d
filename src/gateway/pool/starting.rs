//! Requests that only a starting engine could serve: when they wait, and what a refusal says.
//!
//! They wait in the pool's queue like any other, because most starts that a request meets are nearly over. When it is known
//! that no engine will be ready before the request's deadline, waiting would only keep the client from going elsewhere: it
//! is refused at once, as proxies do that have no server up. Either way the reason is `engine_starting`, and `Retry-After`
//! says when the first engine is expected to be ready, where that is known. The owner of the engines sets that time; here
//! is no clock.

use tokio::time::Instant;

use super::backend::Cordon;
use super::state::AdmissionState;
use sluice_core::base::PoolId;

/// The engines that requests depend on are starting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EnginesStarting {
    /// When the first is expected to be ready; `None`: not known for each of them.
    pub(super) ready_at: Option<Instant>,
}

impl AdmissionState {
    /// Whether no backend of these pools is in rotation and at least one is starting.
    pub(super) fn engines_starting(&self, pools: &[PoolId]) -> Option<EnginesStarting> {
        let mut starting = None;
        for id in pools.iter().flat_map(|pool| self.members(*pool)) {
            let Some(backend) = self.backend(*id).filter(|backend| !backend.draining && !backend.removed) else {
                continue;
            };
            if backend.in_rotation() {
                return None;
            }
            // An engine that drains is about to start: when it will be ready is not known yet.
            let ready_at = match backend.cordon {
                Cordon::Starting => backend.ready_at,
                Cordon::Draining => None,
                Cordon::Open | Cordon::Down => continue,
            };
            starting = Some(match starting {
                None => EnginesStarting { ready_at },
                Some(EnginesStarting { ready_at: first }) => EnginesStarting {
                    ready_at: first.zip(ready_at).map(|(one, other): (Instant, Instant)| one.min(other)),
                },
            });
        }
        starting
    }

    /// Whether no engine of these pools will be ready by `deadline`, as far as that is known.
    pub(super) fn starts_too_late(&self, pools: &[PoolId], deadline: Instant) -> bool {
        let starting = self.engines_starting(pools);
        starting.and_then(|starting| starting.ready_at).is_some_and(|ready_at| ready_at > deadline)
    }
}
