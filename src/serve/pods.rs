//! The pods that pools have now. The configuration names pods only by their labels.
//!
//! `find_pods` (cargo feature `kubernetes`) finds the pods. They become the backends of their pools
//! whenever a configuration is put in force, by a reload or because the pods changed.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::fleet::discovery::PodsView;
use sluice_config::{Config, FoundPod};

#[derive(Debug, Default)]
pub(crate) struct Pods {
    found: Mutex<BTreeMap<String, Vec<FoundPod>>>,
    views: Mutex<Vec<PodsView>>,
}

impl Pods {
    /// Puts the pods into a configuration that is about to be put in force.
    pub(super) fn put(&self, config: &mut Config) {
        for (name, why) in config.put_pods(&self.found.lock()) {
            tracing::warn!("the pod {name} is not used: {why}");
        }
    }

    pub(super) fn views(&self) -> Vec<PodsView> {
        self.views.lock().clone()
    }

    #[cfg(feature = "kubernetes")]
    pub(super) fn show(&self, views: Vec<PodsView>) {
        *self.views.lock() = views;
    }

    /// Replaces the pods of all pools. Returns whether they differ from before.
    #[cfg(feature = "kubernetes")]
    pub(super) fn set(&self, found: BTreeMap<String, Vec<FoundPod>>) -> bool {
        let mut before = self.found.lock();
        let differs = *before != found;
        *before = found;
        differs
    }
}
