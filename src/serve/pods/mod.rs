//! The pods that pools have now. The configuration names pods only by their labels.
//!
//! `follow.rs` (cargo feature `kubernetes`) finds the pods, which become backends whenever a
//! configuration is put in force.

#[cfg(feature = "kubernetes")]
mod follow;

use std::collections::BTreeMap;

use parking_lot::Mutex;

use sluice_config::{Config, FoundPod};
use sluice_fleet::discovery::PodsView;

#[cfg(feature = "kubernetes")]
pub(crate) use follow::start;

#[derive(Debug, Default)]
pub(crate) struct Pods {
    found: Mutex<BTreeMap<String, Vec<FoundPod>>>,
    views: Mutex<Vec<PodsView>>,
}

impl Pods {
    pub(crate) fn put(&self, config: &mut Config) {
        for (name, why) in config.put_pods(&self.found.lock()) {
            tracing::warn!("the pod {name} is not used: {why}");
        }
    }

    pub(crate) fn views(&self) -> Vec<PodsView> {
        self.views.lock().clone()
    }

    #[cfg(feature = "kubernetes")]
    pub(crate) fn show(&self, views: Vec<PodsView>) {
        *self.views.lock() = views;
    }

    /// Replaces the pods of all pools. Returns whether they changed.
    #[cfg(feature = "kubernetes")]
    pub(crate) fn set(&self, found: BTreeMap<String, Vec<FoundPod>>) -> bool {
        let mut before = self.found.lock();
        let differs = *before != found;
        *before = found;
        differs
    }
}
