//! The routing table in force, and how a reload replaces it.
//!
//! Readers load the current table without a lock. A request that learns from admission that its table is out of date
//! waits here for the next one: admission applies a reload a moment before the table is replaced.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use super::routing_table::RoutingTable;

/// Holder of the current routing table.
#[derive(Debug)]
pub(super) struct Router {
    current: ArcSwap<RoutingTable>,
    /// Notified after `current` was replaced.
    replaced: Notify,
}

impl Router {
    pub(super) fn new(table: RoutingTable) -> Self {
        Self { current: ArcSwap::from_pointee(table), replaced: Notify::new() }
    }

    pub(super) fn current(&self) -> Arc<RoutingTable> {
        self.current.load_full()
    }

    pub(super) fn replace(&self, table: RoutingTable) {
        self.current.store(Arc::new(table));
        self.replaced.notify_waiters();
    }

    /// Resolves with the current table as soon as it is not `old`.
    pub(super) async fn newer_than(&self, old: &Arc<RoutingTable>) -> Arc<RoutingTable> {
        loop {
            // Created before the load, so that a replacement in between is not missed.
            let replaced = self.replaced.notified();
            let table = self.current();
            if !Arc::ptr_eq(&table, old) {
                return table;
            }
            replaced.await;
        }
    }
}
