//! The routing plan: one configuration in the form the path of a request reads it.
//!
//! Built whole from a `Config` and the ids that admission gave to its pools, swapped in at once, never
//! changed: a request that has loaded a plan sees one consistent configuration to its end, whatever is
//! reloaded meanwhile. Estimators, exact counters and key usage are handed in, because what has been
//! learned outlives a reload.
//!
//! Models: declared ones and their aliases; names that backends have reported, as far as a pool serves
//! `"*"`; and, when such a pool exists, one entry for every other name, so that the engine itself says
//! that it does not exist. Labels in metrics come from the configuration and the backends, never from
//! clients; the entry for unknown names is labelled [`OTHER`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::keys::{ApiKey, KeyUsage, Keyring};
use crate::config::{Config, PromptRange, Timeouts, UsageInjection, limits};
use crate::estimate::{ExactCounter, ModelEstimator};
use crate::pool::{BackendLimits, LongPrefix, PoolLayout};
use sluice_core::base::{ModelId, PoolId};
use sluice_core::meter::slo::Objectives;

/// The label of models that nobody declared or reported.
pub const OTHER: &str = "other";

/// One configuration, ready to route by.
#[derive(Debug)]
pub struct RoutingTable {
    /// The configuration it was built of.
    pub config: Arc<Config>,
    /// The number of the layout that its ids are from.
    pub layout: u64,
    /// Pools in the order of the configuration.
    pub pools: Vec<PoolRoute>,
    /// Who may ask.
    pub keys: Keyring,
    entries: Vec<ModelRoute>,
    by_name: HashMap<String, usize>,
    other: Option<usize>,
}

/// One pool.
#[derive(Debug)]
pub struct PoolRoute {
    /// Its id in admission.
    pub id: PoolId,
    /// Its name, a label.
    pub name: Arc<str>,
    /// Prompt lengths it is home to.
    pub range: PromptRange,
    /// BackendLimits of each of its backends.
    pub limits: BackendLimits,
    /// Positions of the pools its requests may spill to.
    pub spill: Vec<usize>,
    /// Whether usage is asked for on behalf of the client.
    pub usage: UsageInjection,
    /// What counts as good.
    pub objectives: Objectives,
}

/// One model.
#[derive(Debug)]
pub struct ModelRoute {
    /// Its name, a label; what goes upstream when a client used an alias.
    pub name: Arc<str>,
    /// Its declaration; `None` when only backends know it.
    pub declared: Option<ModelId>,
    /// Positions of the pools that serve it.
    pub pools: Vec<usize>,
    /// What has been learned about its tokens.
    pub estimator: Arc<ModelEstimator>,
    /// Exact counts, if a tokenizer is configured.
    pub exact: Option<Arc<ExactCounter>>,
    /// Prompt tokens assumed per media part.
    pub media_part_tokens: u64,
}

/// What outlives a reload and is handed from plan to plan.
#[derive(Debug, Default)]
pub struct LearnedState {
    estimators: parking_lot::Mutex<HashMap<String, Arc<ModelEstimator>>>,
    /// Usage of API keys.
    pub key_usage: KeyUsage,
}

impl LearnedState {
    /// What is known about a model; starts from nothing. Bounded by [`limits::MAX_MODELS`] names:
    /// beyond that a fresh estimator is used and forgotten with its plan.
    fn estimator(&self, name: &str) -> Arc<ModelEstimator> {
        let mut known = self.estimators.lock();
        if let Some(found) = known.get(name) {
            return Arc::clone(found);
        }
        let fresh = Arc::new(ModelEstimator::default());
        if known.len() < limits::MAX_MODELS {
            known.insert(name.to_owned(), Arc::clone(&fresh));
        }
        fresh
    }
}

impl RoutingTable {
    /// Builds the plan of `config`, whose pools admission knows by `layout`. `reported`: model names
    /// that backends say they serve. `counters`: one per declared model, in order.
    pub fn new(
        config: Arc<Config>,
        layout: &PoolLayout,
        reported: &[String],
        counters: &[Option<Arc<ExactCounter>>],
        learned: &LearnedState,
    ) -> Self {
        let pools = config.pools.iter().zip(&layout.pools).map(|(pool, id)| PoolRoute::new(pool, *id)).collect();
        let keys = Keyring::new(&config.auth, &learned.key_usage);
        let (entries, by_name, other, layout) = (Vec::new(), HashMap::new(), None, layout.number);
        let mut plan = Self { pools, keys, entries, by_name, other, config, layout };
        plan.declare(counters, learned);
        let open: Vec<usize> = (0..plan.pools.len())
            .filter(|index| matches!(plan.config.pools[*index].models, crate::config::ModelScope::All))
            .collect();
        if !open.is_empty() {
            for name in reported.iter().take(limits::MAX_MODELS) {
                if !plan.by_name.contains_key(name) {
                    plan.by_name.insert(name.clone(), plan.entries.len());
                    plan.entries.push(ModelRoute::undeclared(name, &open, learned));
                }
            }
            plan.other = Some(plan.entries.len());
            plan.entries.push(ModelRoute::undeclared(OTHER, &open, learned));
        }
        plan
    }

    /// The model that a client's name means, and whether that name is an alias to be replaced.
    pub fn model(&self, name: &str) -> Option<(&ModelRoute, bool)> {
        let index = self.by_name.get(name).copied().or(self.other)?;
        let entry = &self.entries[index];
        let alias = entry.declared.is_some() && *entry.name != *name;
        Some((entry, alias))
    }

    /// Names that the holder of a key may send, for error messages and `/v1/models`: declared and reported ones. Where
    /// no key is asked for there is no holder, and everybody may use everything.
    pub fn names(&self, holder: Option<&ApiKey<'_>>) -> impl Iterator<Item = &ModelRoute> {
        let known = self.entries.iter().enumerate().filter(|(index, _)| Some(*index) != self.other);
        known.map(|(_, entry)| entry).filter(move |entry| holder.is_none_or(|holder| holder.may_use(entry.declared)))
    }

    /// The timeouts in force.
    pub fn timeouts(&self) -> &Timeouts {
        &self.config.timeouts
    }

    /// How long the first byte may take, for a prompt of this many tokens.
    pub fn first_byte(&self, stream: bool, prompt_tokens: u64) -> Duration {
        let timeouts = &self.config.timeouts;
        let grown = timeouts.first_byte.per_1k_prompt_tokens.mul_f64(prompt_tokens as f64 / 1000.0);
        let scaled = timeouts.first_byte.base.saturating_add(grown);
        if stream { scaled } else { scaled.max(timeouts.response) }
    }

    fn declare(&mut self, counters: &[Option<Arc<ExactCounter>>], learned: &LearnedState) {
        for (index, model) in self.config.models.iter().enumerate() {
            let id = ModelId::new(index);
            let serves = |pool: &usize| self.config.pools[*pool].models.includes(id);
            self.entries.push(ModelRoute {
                name: model.name.as_str().into(),
                declared: Some(id),
                pools: (0..self.config.pools.len()).filter(serves).collect(),
                estimator: learned.estimator(&model.name),
                exact: counters.get(index).cloned().flatten(),
                media_part_tokens: model.media_part_tokens.0,
            });
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                self.by_name.insert(name.clone(), index);
            }
        }
    }
}

impl PoolRoute {
    fn new(pool: &crate::config::Pool, id: PoolId) -> Self {
        Self {
            id,
            name: pool.name.as_str().into(),
            range: pool.prompt_tokens,
            limits: limits_of(pool),
            spill: pool.spill.iter().map(|pool| pool.index()).collect(),
            usage: pool.usage,
            objectives: Objectives { ttft: pool.slo.ttft, tpot: pool.slo.tpot, e2el: pool.slo.e2el },
        }
    }
}

impl ModelRoute {
    fn undeclared(name: &str, pools: &[usize], learned: &LearnedState) -> Self {
        Self {
            name: name.into(),
            declared: None,
            pools: pools.to_vec(),
            estimator: learned.estimator(name),
            exact: None,
            media_part_tokens: limits::MEDIA_PART_TOKENS.0,
        }
    }
}

/// The limits of each backend of a pool, in admission's form.
pub fn limits_of(pool: &crate::config::Pool) -> BackendLimits {
    BackendLimits {
        slots: pool.slots,
        tokens: pool.tokens.map(|tokens| tokens.0),
        prefill_tokens: pool.prefill_tokens.map(|tokens| tokens.0),
        long_prefix: pool.long_prefix.map(|long| LongPrefix { threshold: long.threshold.0, slots: long.slots }),
    }
}
