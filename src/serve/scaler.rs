//! Lets the scaler look at the pools every second.
//!
//! Its own task, because it must go on where the online tuner is off. It takes the lock of admission for a snapshot; without an
//! `autoscale` table it does nothing. It ends with the tasks that decide about engines: of two gateways, one publishes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::app::App;

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

impl App {
    /// Looks at the pools until `end` is true.
    pub(super) async fn keep_scaling(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let config = self.config.load_full();
            if config.pools.iter().all(|pool| pool.autoscale.is_none()) {
                continue;
            }
            let (view, pods, now) = (self.admission.view(), self.pods.views(), self.tuning.started.elapsed());
            for change in self.scaling.step(&config, &view, &pods, &self.tuning.observer, now) {
                tracing::info!("autoscale: {change}");
            }
        }
    }
}
