//! Labels whose values count together because a configuration has too many of them.
//!
//! A page stays below 3 MB with 200 backends, 50 models, 8 classes and 100 keys, by these rules:
//!
//! - Combinations of pool, model and class: at most [`COMBINATIONS`], less one for every two
//!   backends and every four keys. If the pairs of pool and class alone exceed that, all classes
//!   count as [`ALL_CLASSES`]. If the combinations still exceed it, only the first models of each
//!   pool keep their names, and the others count as [`OTHER`].
//! - More than [`BACKENDS`] pairs of backend and class, or [`KEYS`] pairs of key and class: the
//!   metrics of backends, or of keys, have the class [`ALL_CLASSES`].
//!
//! The rules depend on the configuration alone, so replicas merge alike. Objectives are exempt:
//! alerts need both class and model. `sluice_metrics_merged` shows the rules in force.

use std::collections::HashSet;

use super::exposition::Page;
use super::families;
use crate::flow::routing_table::OTHER;
use sluice_config::Config;
use sluice_core::base::ModelId;

/// Combinations of pool, model and class, of 16 kB each: four histograms.
pub(super) const COMBINATIONS: usize = 180;
/// Pairs of backend and class, of 4 kB each; a backend has 3 kB without them.
pub(super) const BACKENDS: usize = 240;
/// Pairs of key and class, of 2 kB each; a key has 2 kB without them.
pub(super) const KEYS: usize = 200;
pub(super) const ALL_CLASSES: &str = "all";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Merge {
    /// Pairs of pool and model that keep their names; `None`: all.
    named: Option<HashSet<[String; 2]>>,
    classes: bool,
    /// The same as [`classes`](Self::classes), for the metrics of keys.
    pub(super) classes_of_keys: bool,
}

impl Merge {
    pub(super) fn of(config: &Config) -> Self {
        let first = |most| config.pools.iter().flat_map(move |pool| first_models(config, pool, most));
        let (pools, all_classes) = (config.pools.len().max(1), config.classes.len().max(1));
        let backends: usize = config.pools.iter().map(|pool| pool.backends.len()).sum();
        let keys = config.auth.keys.len();
        let room = COMBINATIONS.saturating_sub(backends / 2 + keys / 4);
        let classes = pools * all_classes > room;
        let left = if classes { 1 } else { all_classes };
        let is_too_many = first(usize::MAX).count() * left > room;
        // One combination is left for the other models of a pool.
        let named = is_too_many.then(|| first((room / (pools * left)).saturating_sub(1)).collect());
        Self { named, classes, classes_of_keys: keys * all_classes > KEYS }
    }

    pub(super) fn model<'a>(&self, pool: &str, model: &'a str) -> &'a str {
        let is_named = |named: &HashSet<[String; 2]>| named.iter().any(|[of, name]| of == pool && name == model);
        if model.is_empty() || self.named.as_ref().is_none_or(is_named) { model } else { OTHER }
    }

    pub(super) fn class<'a>(&self, class: &'a str) -> &'a str {
        if self.classes && !class.is_empty() { ALL_CLASSES } else { class }
    }

    /// Adds the rules in force. `classes_of_backends`: whether the metrics of backends have no
    /// classes.
    pub(super) fn add(&self, classes_of_backends: bool, page: &mut Page) {
        let rules = [
            ("requests", "model", self.named.is_some()),
            ("requests", "class", self.classes),
            ("backends", "class", classes_of_backends),
            ("keys", "class", self.classes_of_keys),
        ];
        for (of, label, merged) in rules {
            page.add(&families::METRICS_MERGED, &[of, label], f64::from(u8::from(merged)));
        }
    }
}

/// A pool with each of the first `most` models that it serves.
fn first_models<'a>(
    config: &'a Config,
    pool: &'a sluice_config::Pool,
    most: usize,
) -> impl Iterator<Item = [String; 2]> + 'a {
    let served = config.models.iter().enumerate().filter(|(index, _)| pool.models.includes(ModelId::new(*index)));
    served.take(most).map(|(_, model)| [pool.name.clone(), model.name.clone()])
}

#[cfg(test)]
mod tests {
    use super::super::Telemetry;
    use super::super::testing::{FEW_POOLS, Large, MANY_POOLS, completed};
    use super::*;
    use crate::flow::Record;
    use std::time::Duration;

    #[test]
    fn few_combinations_keep_their_names() {
        let small = Large { pairs: 1, backends_of_a_pool: 4, models_of_a_pair: 6 };
        let merge = Merge::of(&small.config());
        assert_eq!([merge.model("short-0", "model-5"), merge.class("class-3")], ["model-5", "class-3"]);
        assert_eq!(merge, Merge { classes_of_keys: true, ..Merge::default() });
    }

    #[test]
    fn in_few_pools_models_merge_in_order_of_the_configuration() {
        let merge = Merge::of(&FEW_POOLS.config());
        let labels = ["model-0", "model-1", "model-2", "model-49", ""].map(|model| merge.model("short-0", model));
        assert_eq!(labels, ["model-0", "model-1", OTHER, OTHER, ""]);
        assert_eq!([merge.class("class-3"), merge.class("")], ["class-3", ""]);
    }

    #[test]
    fn in_many_pools_classes_merge_before_models() {
        let merge = Merge::of(&Large { pairs: 10, backends_of_a_pool: 4, models_of_a_pair: 3 }.config());
        assert_eq!(
            [merge.class("class-3"), merge.class(""), merge.model("short-1", "model-5")],
            [ALL_CLASSES, "", "model-5"]
        );
        let more = Merge::of(&MANY_POOLS.config());
        assert_eq!([more.class("class-3"), more.model("short-1", "model-3")], [ALL_CLASSES, OTHER]);
    }

    fn shown(telemetry: &Telemetry, name: &str) -> bool {
        let page = telemetry.page();
        page.lines().any(|line| !line.starts_with('#') && line.contains(name))
    }

    #[test]
    fn names_of_a_few_reloads_stay_and_names_of_many_leave_the_page() {
        let one = Large { pairs: 1, backends_of_a_pool: 1, models_of_a_pair: 2 };
        let (mut config, admission) = (one.config(), one.admission(tokio::time::Instant::now()));
        let telemetry = Telemetry::with(Box::new(move || admission.view()), None);
        telemetry.configured(&config);
        let records = one.traffic();
        records.iter().for_each(|record| telemetry.record(record));
        assert!(["model-1", "class-7", "key-3\""].iter().all(|name| shown(&telemetry, name)));
        config.models[1].name = "renamed".to_owned();
        config.classes[7].name = "huge".to_owned();
        config.auth.keys[3].name = "new".to_owned();
        telemetry.configured(&config);
        assert!(shown(&telemetry, "model-1") && shown(&telemetry, "class-7"), "their counts go on");
        assert!(!shown(&telemetry, "key-3\""));
        for number in 0..20 {
            config.models[1].name = format!("renamed-{number}");
            telemetry.configured(&config);
        }
        for name in ["model-1", "class-7"] {
            assert!(!shown(&telemetry, name), "{name}");
        }
        let of_new = Record { key: Some("new".into()), class: Some("huge".into()), ..records[0].clone() };
        telemetry.record(&of_new);
        telemetry.record(&records[0]);
        let count =
            "sluice_time_to_first_token_seconds_count{arm=\"\",class=\"huge\",model=\"model-0\",pool=\"short-0\"} 1";
        assert!(telemetry.page().contains(count), "{}", telemetry.page());
        assert!(shown(&telemetry, "sluice_key_queue_wait_seconds_count{key=\"new\"} 1"));
    }

    #[test]
    fn a_backend_that_left_its_pool_leaves_the_page() {
        let telemetry =
            Telemetry::with(Box::new(|| super::super::testing::admission(tokio::time::Instant::now()).view()), None);
        let record = completed(Duration::from_millis(30), Duration::from_millis(5));
        telemetry.record(&record);
        telemetry.record(&Record { backend: Some("pod-1".into()), ..record });
        telemetry.page();
        assert!(shown(&telemetry, "sluice_backend_requests_total{backend=\"gpu0\""));
        assert!(!shown(&telemetry, "backend=\"pod-1\""));
    }
}
