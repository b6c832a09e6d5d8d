//! The pods that pools have now, beside the configuration that names them only by their labels.
//!
//! Finding them is `find_pods`, under the cargo feature `kubernetes`. Here is what both a reload and a change of pods need: the
//! pods of each pool, which become its backends whenever a configuration is put in force.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::config::{Config, FoundPod};
use crate::fleet::discovery::PodsView;

/// What was found.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    /// By pool.
    found: Mutex<BTreeMap<String, Vec<FoundPod>>>,
    /// For `/admin/status`.
    views: Mutex<Vec<PodsView>>,
}

impl Pods {
    /// Puts the pods into a configuration that is about to be in force.
    pub(super) fn put(&self, config: &mut Config) {
        for (name, why) in config.put_pods(&self.found.lock()) {
            tracing::warn!("the pod {name} is not used: {why}");
        }
    }

    /// For `/admin/status`.
    pub(super) fn views(&self) -> Vec<PodsView> {
        self.views.lock().clone()
    }

    /// Replaces what is shown.
    #[cfg(feature = "kubernetes")]
    pub(super) fn show(&self, views: Vec<PodsView>) {
        *self.views.lock() = views;
    }

    /// Replaces what was found. Whether it differs.
    #[cfg(feature = "kubernetes")]
    pub(super) fn set(&self, found: BTreeMap<String, Vec<FoundPod>>) -> bool {
        let mut before = self.found.lock();
        let differs = *before != found;
        *before = found;
        differs
    }
}
