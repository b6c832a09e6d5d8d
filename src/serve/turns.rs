//! Lets engines that share a device (`launch.share`) take turns.
//!
//! `fleet` decides and acts. This task calls it every [`INTERVAL`], which adds to the time of a
//! switch. It ends with the tasks that decide about engines, so of two gateways only one acts.
//! Without `share` in the configuration, a look costs nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::core::Core;
use sluice_config::{Config, Target};

/// Short beside a wake, which takes a second or more.
const INTERVAL: Duration = Duration::from_millis(50);
/// Pause between two looks at a configuration in which no engine shares a device.
const PAUSE: Duration = Duration::from_secs(1);

pub(crate) fn start(core: &Arc<Core>, end: &watch::Receiver<bool>) -> JoinHandle<()> {
    tokio::spawn(keep_turns(Arc::clone(core), end.clone()))
}

fn any(config: &Config) -> bool {
    let shares = |target: &Target| matches!(target, Target::Launch(launch) if launch.share.is_some());
    config.backends().any(|(_, _, backend)| shares(&backend.target))
}

async fn keep_turns(core: Arc<Core>, mut end: watch::Receiver<bool>) {
    loop {
        let shared = any(&core.config.load());
        tokio::select! {
            () = tokio::time::sleep(if shared { INTERVAL } else { PAUSE }) => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
        if shared {
            core.fleet.take_turns().await;
        }
    }
}
