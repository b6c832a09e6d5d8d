//! Follows the KV events of the engines of pools with `prefix = "events"`.
//!
//! Each such backend has a task ([`follower`]) that subscribes to the engine's events ([`zmtp`]),
//! keeps its blocks ([`chains`]), and reports to admission which expectations no longer
//! hold. Tasks begin and end with the backends of the configuration.
//!
//! Bounds: one task for each backend of such a pool; the modules name others.

mod zmtp;
mod chains;
mod follower;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::sleep;

use self::follower::Follower;
use sluice_config::Address;
use sluice_core::base::BackendId;
use sluice_core::engines::EngineKind;
use sluice_gateway::pool::{Admission, PoolView};

/// Time between two looks at the backends of the configuration.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

struct Task {
    address: Arc<Address>,
    handle: JoinHandle<()>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// Follows events for as long as the future is polled.
pub async fn follow_kv_events(admission: Arc<Admission>) {
    let mut tasks: HashMap<BackendId, Task> = HashMap::new();
    loop {
        let view = admission.view();
        let wanted = wanted(&view);
        tasks.retain(|id, task| {
            let stays = wanted.iter().any(|(other, _, address)| other == id && **address == *task.address);
            if !stays {
                admission.stop_following_events(*id, &task.address);
            }
            stays
        });
        for (id, name, address) in wanted {
            if !tasks.contains_key(&id)
                && let Some(served) = admission.follow_events(id, &address)
            {
                let follower = Follower::new(Arc::clone(&admission), id, name, Arc::clone(&address), served);
                tasks.insert(id, Task { address, handle: tokio::spawn(follower.run()) });
            }
        }
        sleep(LOOK_INTERVAL).await;
    }
}

/// The backends whose events are followed: id, name and address.
fn wanted(view: &[PoolView]) -> Vec<(BackendId, String, Arc<Address>)> {
    let backends = view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (pool, backend)));
    backends
        .filter(|(_, backend)| !backend.removed && backend.address.engine == EngineKind::Vllm)
        .filter(|(_, backend)| backend.address.events.is_some())
        .map(|(pool, backend)| (backend.id, format!("{}/{}", pool.name, backend.name), Arc::clone(&backend.address)))
        .collect()
}
