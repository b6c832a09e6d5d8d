//! Labels whose values count together because a configuration has too many of them.
//!
//! A page stays below 3 MB with 200 backends, 50 models, 8 classes and 100 keys, by these rules:
//!
//! - More than [`COMBINATIONS`] combinations of pool, model and class: in each pool the models
//!   after the first ones of the configuration count as [`OTHER`]. If there are more than
//!   [`COMBINATIONS`] pairs of pool and class, all classes count as [`ALL_CLASSES`] before.
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

/// Combinations of pool, model and class with four histograms of up to 33 series each.
pub(super) const COMBINATIONS: usize = 96;
/// Pairs of backend and class, of 34 series each.
pub(super) const BACKENDS: usize = 240;
/// Pairs of key and class, of 23 series each.
pub(super) const KEYS: usize = 200;
/// The class of merged classes.
pub(super) const ALL_CLASSES: &str = "all";

/// What is merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Merge {
    /// Pairs of pool and model that keep their names; `None`: all.
    named: Option<HashSet<[String; 2]>>,
    /// Whether the requests of all classes count together.
    classes: bool,
    /// The same for the metrics of keys.
    pub(super) classes_of_keys: bool,
}

impl Merge {
    /// The rules for a configuration.
    pub(super) fn of(config: &Config) -> Self {
        let first = |most| config.pools.iter().flat_map(move |pool| first_models(config, pool, most));
        let (pools, all_classes) = (config.pools.len().max(1), config.classes.len().max(1));
        let classes = pools * all_classes > COMBINATIONS;
        let left = if classes { 1 } else { all_classes };
        let is_too_many = first(usize::MAX).count() * left > COMBINATIONS;
        let named = is_too_many.then(|| first((COMBINATIONS / (pools * left)).max(1)).collect());
        Self { named, classes, classes_of_keys: config.auth.keys.len() * all_classes > KEYS }
    }

    /// The label of a model in a pool.
    pub(super) fn model<'a>(&self, pool: &str, model: &'a str) -> &'a str {
        let is_named = |named: &HashSet<[String; 2]>| named.iter().any(|[of, name]| of == pool && name == model);
        if model.is_empty() || self.named.as_ref().is_none_or(is_named) { model } else { OTHER }
    }

    /// The label of a class.
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
