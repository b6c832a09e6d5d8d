//! Puts a configuration in force: pools, limits, routing and engines, in one step.
//!
//! A caller holds [`Core::alone`]. Requests in flight keep their routing table, and waiting
//! requests keep their place. Engines change only if this gateway manages them; otherwise they
//! count as external.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Core, Counters};
use crate::engines;
use sluice_config::Config;
use sluice_fleet::JournalError;
use sluice_gateway::estimate::ExactCounter;
use sluice_gateway::flow::{RoutingTable, specs};
use sluice_gateway::pool::PoolLayout;

impl Core {
    /// Puts a configuration in force. If `counters` is `None`, the counters in use stay.
    pub(crate) fn switch(&self, config: Config, counters: Option<Counters>) {
        let config = Arc::new(config);
        let mut loaded = self.loaded.lock();
        self.telemetry.configured(&config);
        if let Some(counters) = counters {
            loaded.counters = counters;
        }
        loaded.layout = self.enforce(&config, &loaded.counters);
        let layout = &loaded.layout;
        self.apply_engines(&config, layout);
        self.flow.upstream().set_timeouts(&config.timeouts);
        self.clients.configure(&config.server);
        self.flow.set_response_memory(config.server.max_response_memory.0);
        self.config.store(config);
        self.note_served_models();
        self.probe_now.notify_one();
    }

    pub(crate) fn put_limits(&self, change: impl FnOnce(&mut Config)) {
        let _alone = self.alone();
        let mut config = Config::clone(&self.config.load());
        change(&mut config);
        let config = Arc::new(config);
        let mut loaded = self.loaded.lock();
        loaded.layout = self.enforce(&config, &loaded.counters);
        self.config.store(config);
    }

    fn enforce(&self, config: &Arc<Config>, counters: &[Option<Arc<ExactCounter>>]) -> PoolLayout {
        let (pools, health) = (specs::pools(config), specs::health_rules(&config.health));
        let draft = RoutingTable::draft(Arc::clone(config), &self.reported.names(), counters, &self.learned);
        let layout = self.admission.apply_with(&pools, health, Instant::now(), |layout| {
            self.flow.set_routing_table(draft.placed(layout));
        });
        self.flow.drop_unused_tables();
        layout
    }

    pub(crate) fn set_acts(&self, acts: bool) {
        let _alone = self.alone();
        // The lead may have been lost during the wait for a reload.
        let acts = acts && self.fleet.lead().is_held();
        *self.acts.lock() = acts;
        if !acts {
            // An earlier reload may have opened the journal.
            self.fleet.close_journal();
        }
        let (config, loaded) = (self.config.load_full(), self.loaded.lock());
        self.apply_engines(&config, &loaded.layout);
    }

    /// Hands the engines to the fleet. Returns the number of managed ones.
    pub(crate) fn apply_engines(&self, config: &Config, layout: &PoolLayout) -> usize {
        let acts = self.acts();
        let external = engines::external_backends(config, layout, !acts);
        if !acts {
            self.fleet.stand_by(external);
            return 0;
        }
        let own = engines::engines(config, layout, |bytes| self.fleet.digest(bytes));
        let count = own.len();
        self.fleet.apply(own, external);
        count
    }

    pub(crate) fn take_engines_back(&self) -> Result<(), JournalError> {
        let config = self.config.load_full();
        if engines::any(&config) {
            self.fleet.open(&config.fleet.state)?;
        }
        self.fleet.take_back();
        self.apply_engines(&config, &self.loaded.lock().layout);
        Ok(())
    }
}
