//! The routing table in force, replaced by a reload.
//!
//! Readers load the current table without a lock. A request that admission finds to have an old
//! table waits here for the next one, because admission applies a reload a moment before the table
//! is replaced.
//!
//! A replaced table is kept until no request uses it, and then dropped by [`Router::drop_unused`].
//! With 10,000 keys that takes milliseconds, which must not delay a request. At most one table is
//! kept for each reload with running requests.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::routing_table::RoutingTable;

#[derive(Debug)]
pub(super) struct Router {
    current: ArcSwap<RoutingTable>,
    replaced: Notify,
    /// Replaced tables that may still be in use.
    retired: Mutex<Vec<Arc<RoutingTable>>>,
}

impl Router {
    pub(super) fn new(table: RoutingTable) -> Self {
        Self { current: ArcSwap::from_pointee(table), replaced: Notify::new(), retired: Mutex::default() }
    }

    pub(super) fn current(&self) -> Arc<RoutingTable> {
        self.current.load_full()
    }

    pub(super) fn replace(&self, table: RoutingTable) {
        let old = self.current.swap(Arc::new(table));
        self.retired.lock().push(old);
        self.replaced.notify_waiters();
    }

    /// Drops the replaced tables that no request uses. Takes milliseconds for a large table.
    pub(super) fn drop_unused(&self) {
        // Once only this list holds a table, no other holder can appear.
        let unused: Vec<_> = self.retired.lock().extract_if(.., |table| Arc::strong_count(table) == 1).collect();
        drop(unused);
    }

    pub(super) fn has_retired(&self) -> bool {
        !self.retired.lock().is_empty()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::LearnedState;
    use crate::pool::PoolLayout;
    use sluice_config::{Config, Machine, Surroundings};

    fn table() -> RoutingTable {
        let text = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n";
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let config = Config::parse(text, "test", &[], &around).unwrap().config;
        RoutingTable::new(Arc::new(config), &PoolLayout::default(), &[], &[], &LearnedState::default())
    }

    #[test]
    fn a_replaced_table_is_not_dropped_by_the_last_request_that_used_it() {
        let router = Router::new(table());
        let of_request = router.current();
        let watched = Arc::downgrade(&of_request);
        router.replace(table());
        router.drop_unused();
        assert!(watched.upgrade().is_some(), "it is in use");
        drop(of_request);
        assert!(watched.upgrade().is_some(), "the request has dropped it");
        router.drop_unused();
        assert!(watched.upgrade().is_none() && !router.has_retired());
    }
}
