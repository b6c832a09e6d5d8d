//! The routing table: one configuration in the form that the request path reads.
//!
//! It is built from a `Config` and the ids that admission assigned to the pools, and never changed,
//! so a request sees one consistent configuration to the end. Estimators, exact counters and key
//! usage are passed in, because they outlive a reload.
//!
//! It has the declared models with their aliases. If a pool serves `"*"`, it also has the names
//! that backends report, and one route for every other name, so that the engine's own error reaches
//! the client. Labels of metrics come from the configuration and from backends, never from clients:
//! the route for unknown names has the label [`OTHER`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use foldhash::quality::RandomState;

use super::classes::Classes;
use super::keys::{ApiKey, KeyUsage, Keyring};
use crate::estimate::{ExactCounter, ModelEstimator};
use crate::experiment::{ExperimentSet, Experiments};
use crate::pool::{Admission, BackendLimits, LongPrefix, ModelKey, PoolLayout};
use sluice_config::{Config, Fair, ModelScope, PromptRange, Timeouts, UsageInjection, limits};
use sluice_core::base::{BackendId, ModelId, PoolId};
use sluice_core::engines::EngineKind;
use sluice_core::meter::slo::Objectives;
use sluice_core::openai::Route;
use sluice_core::openai::job_cost::CostRule;

/// The label of models that are neither declared nor reported.
pub const OTHER: &str = "other";

/// One configuration, ready to route by.
#[derive(Debug)]
pub struct RoutingTable {
    /// The configuration from which the table was built.
    pub config: Arc<Config>,
    /// The number of the layout that assigned the ids.
    pub layout: u64,
    /// Pools in the order of the configuration.
    pub pools: Vec<PoolRoute>,
    /// Classes by which latency is shown.
    pub classes: Classes,
    /// API keys of clients.
    pub keys: Keyring,
    /// Experiments.
    pub experiments: ExperimentSet,
    models: Vec<ModelRoute>,
    by_name: HashMap<String, usize, RandomState>,
    other: Option<usize>,
    /// The paths that pools name, and the position of the model of each.
    paths: HashMap<String, usize, RandomState>,
}

/// One pool.
#[derive(Debug)]
pub struct PoolRoute {
    /// The pool's id in admission.
    pub id: PoolId,
    /// The ids of the pool's backends, in the order of the configuration.
    pub backends: Vec<BackendId>,
    /// The pool's name, a label.
    pub name: Arc<str>,
    /// Prompt lengths for which the pool is home.
    pub range: PromptRange,
    /// Limits of each backend.
    pub limits: BackendLimits,
    /// Positions of the pools to which requests may spill.
    pub spill: Vec<usize>,
    /// Whether usage is requested on behalf of the client.
    pub usage: UsageInjection,
    /// Objectives that a request must meet to count for goodput, by class.
    pub objectives: Box<[Objectives]>,
    /// The owners that take turns in the pool's queue.
    pub fair: Fair,
    /// The kind of the pool's engines.
    pub engine: EngineKind,
    /// The cost of a request, if it is not counted in tokens.
    pub cost: Option<JobCost>,
}

/// The cost of the requests of a pool.
#[derive(Debug)]
pub struct JobCost {
    /// The rule.
    pub rule: CostRule,
    /// The name of the unit.
    pub unit: Arc<str>,
    /// Whether a job without a field was logged.
    pub was_logged: AtomicBool,
}

/// One model.
#[derive(Debug)]
pub struct ModelRoute {
    /// The model's name, a label. It is sent upstream when a client used an alias.
    pub name: Arc<str>,
    /// The model's declaration; `None` if only backends report it.
    pub declared: Option<ModelId>,
    /// Whether the model is declared, or a backend reports it.
    pub is_known: bool,
    /// Positions of the pools that serve the model.
    pub pools: Vec<usize>,
    /// The adapter's id, if the model is a LoRA adapter.
    pub adapter: Option<ModelKey>,
    /// Knowledge about the model's tokens.
    pub estimator: Arc<ModelEstimator>,
    /// Exact counts, if a tokenizer is configured.
    pub exact: Option<Arc<ExactCounter>>,
    /// Prompt tokens assumed per media part.
    pub media_part_tokens: u64,
}

/// A model that was found by name.
#[derive(Clone, Copy, Debug)]
pub struct ModelMatch<'a> {
    /// The model.
    pub route: &'a ModelRoute,
    /// Whether the name is an alias, which must be replaced in the request.
    pub is_alias: bool,
}

/// A routing table without the ids that admission assigns. Building it takes long (about 10 ms with
/// 10,000 keys), so that happens before the lock of admission is taken. Adding the ids under the
/// lock takes almost no time.
#[derive(Debug)]
pub struct RoutingDraft(RoutingTable);

/// State that outlives a reload and is passed from table to table.
#[derive(Debug, Default)]
pub struct LearnedState {
    estimators: parking_lot::Mutex<HashMap<String, Arc<ModelEstimator>>>,
    adapters: parking_lot::Mutex<HashSet<String>>,
    /// Usage of API keys.
    pub key_usage: Arc<KeyUsage>,
    /// State of experiments.
    pub experiments: Experiments,
}

impl LearnedState {
    /// Sets the models that backends report as LoRA adapters, for tables built from now on.
    pub fn set_adapters(&self, names: impl IntoIterator<Item = String>) {
        *self.adapters.lock() = names.into_iter().collect();
    }

    fn adapter(&self, name: &str) -> Option<ModelKey> {
        self.adapters.lock().contains(name).then(|| ModelKey::of(name))
    }

    /// The estimator of a model, created if there is none. At most [`limits::MAX_MODELS`] are kept;
    /// beyond that a new estimator lives as long as the table.
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
    /// Builds the table of `config`, whose pools have the ids of `layout` in admission. `reported`:
    /// model names that backends report. `counters`: one per declared model, in order.
    pub fn new(
        config: Arc<Config>,
        layout: &PoolLayout,
        reported: &[String],
        counters: &[Option<Arc<ExactCounter>>],
        learned: &LearnedState,
    ) -> Self {
        Self::draft(config, reported, counters, learned).placed(layout)
    }

    /// Like [`RoutingTable::new`], without the ids.
    pub fn draft(
        config: Arc<Config>,
        reported: &[String],
        counters: &[Option<Arc<ExactCounter>>],
        learned: &LearnedState,
    ) -> RoutingDraft {
        debug_assert!(!Admission::is_applying(), "a routing table is built while all requests wait for the lock");
        let pools = config.pools.iter().map(|pool| PoolRoute::new(pool, &config)).collect();
        let keys = Keyring::new(&config.auth, &learned.key_usage);
        let experiments = learned.experiments.configure(&config);
        let (models, by_name, paths, other, layout) = (Vec::new(), HashMap::default(), HashMap::default(), None, 0);
        let classes = Classes::of(&config);
        let mut table = Self { pools, classes, keys, experiments, models, by_name, other, paths, config, layout };
        table.declare(counters, learned);
        let open: Vec<usize> = (0..table.pools.len())
            .filter(|index| table.config.pools[*index].models == ModelScope::All)
            .filter(|index| !table.config.pools[*index].arms_only)
            .collect();
        if !open.is_empty() {
            for name in reported.iter().take(limits::MAX_MODELS) {
                if !table.by_name.contains_key(name) {
                    table.by_name.insert(name.clone(), table.models.len());
                    table.models.push(ModelRoute::undeclared(name, true, &open, learned));
                }
            }
            table.other = Some(table.models.len());
            table.models.push(ModelRoute::undeclared(OTHER, false, &open, learned));
        }
        RoutingDraft(table)
    }

    /// The model that a name sent by a client refers to.
    pub fn model(&self, name: &str) -> Option<ModelMatch<'_>> {
        let index = self.by_name.get(name).copied().or(self.other)?;
        let route = &self.models[index];
        Some(ModelMatch { route, is_alias: route.declared.is_some() && *route.name != *name })
    }

    /// The route of a path without query.
    pub fn route(&self, path: &str) -> Option<Route> {
        Route::from_path(path).or_else(|| self.paths.contains_key(path).then_some(Route::Custom))
    }

    /// The model of a path (without query) that a pool names.
    pub fn model_of_path(&self, path: &str) -> Option<&ModelRoute> {
        self.paths.get(path).map(|index| &self.models[*index])
    }

    /// The models that a client may use, declared or reported, for error messages and `/v1/models`.
    /// Without a key: all models.
    pub fn models_for(&self, key: Option<&ApiKey>) -> impl Iterator<Item = &ModelRoute> {
        let known = self.models.iter().enumerate().filter(|(index, _)| Some(*index) != self.other);
        known.map(|(_, model)| model).filter(move |model| key.is_none_or(|key| key.may_use(model.declared)))
    }

    /// Whether a client may ask for undeclared models, because a pool serves every name.
    pub fn is_open_for(&self, key: Option<&ApiKey>) -> bool {
        self.other.is_some() && key.is_none_or(|key| key.may_use(None))
    }

    /// Whether a name is neither a declared model nor an alias.
    pub fn is_undeclared(&self, name: &str) -> bool {
        self.by_name.get(name).is_none_or(|index| self.models[*index].declared.is_none())
    }

    /// The timeouts in force.
    pub fn timeouts(&self) -> &Timeouts {
        &self.config.timeouts
    }

    /// The time that the first byte may take, for a prompt of `prompt_tokens`.
    pub fn first_byte(&self, stream: bool, prompt_tokens: u64) -> Duration {
        let timeouts = &self.config.timeouts;
        let grown = timeouts.first_byte.per_1k_prompt_tokens.mul_f64(prompt_tokens as f64 / 1000.0);
        let scaled = timeouts.first_byte.base.saturating_add(grown);
        if stream { scaled } else { scaled.max(timeouts.response) }
    }

    fn declare(&mut self, counters: &[Option<Arc<ExactCounter>>], learned: &LearnedState) {
        for (index, model) in self.config.models.iter().enumerate() {
            let id = ModelId::new(index);
            let serves = |pool: &usize| {
                let pool = &self.config.pools[*pool];
                !pool.arms_only && pool.models.includes(id)
            };
            self.models.push(ModelRoute {
                name: model.name.as_str().into(),
                declared: Some(id),
                is_known: true,
                pools: (0..self.config.pools.len()).filter(serves).collect(),
                adapter: learned.adapter(&model.name).or(model.adapter.as_ref().map(|_| ModelKey::of(&model.name))),
                estimator: learned.estimator(&model.name),
                exact: counters.get(index).cloned().flatten(),
                media_part_tokens: model.media_part_tokens.0,
            });
            for name in std::iter::once(&model.name).chain(&model.aliases) {
                self.by_name.insert(name.clone(), index);
            }
        }
        for pool in &self.config.pools {
            // Only a pool with one model names paths.
            let ModelScope::Only(models) = &pool.models else { continue };
            let model = models.first().map_or(0, |model| model.index());
            self.paths.extend(pool.routes.iter().map(|path| (path.clone(), model)));
        }
    }
}

impl RoutingDraft {
    /// The table, with the ids of all pools.
    pub fn placed(mut self, layout: &PoolLayout) -> RoutingTable {
        self.0.layout = layout.number;
        for (pool, id) in self.0.pools.iter_mut().zip(&layout.pools) {
            pool.id = *id;
        }
        for (pool, backends) in self.0.pools.iter_mut().zip(&layout.backends) {
            pool.backends.clone_from(backends);
        }
        self.0
    }
}

impl PoolRoute {
    /// A pool without the ids that admission assigns.
    fn new(pool: &sluice_config::Pool, config: &Config) -> Self {
        let has_keys = !config.auth.keys.is_empty();
        let usual = if has_keys { Fair::Key } else { Fair::Off };
        Self {
            id: PoolId::new(0),
            backends: Vec::new(),
            name: pool.name.as_str().into(),
            range: pool.prompt_tokens,
            limits: limits_of(pool),
            spill: pool.spill.iter().map(|pool| pool.index()).collect(),
            usage: pool.usage,
            objectives: Classes::objectives(config, pool),
            fair: pool.queue.fair.clone().unwrap_or(usual),
            engine: *pool.engine,
            cost: pool.cost.as_ref().map(|cost| JobCost {
                rule: cost.rule(),
                unit: cost.unit.as_str().into(),
                was_logged: AtomicBool::new(false),
            }),
        }
    }
}

impl ModelRoute {
    fn undeclared(name: &str, is_known: bool, pools: &[usize], learned: &LearnedState) -> Self {
        Self {
            name: name.into(),
            declared: None,
            is_known,
            pools: pools.to_vec(),
            adapter: learned.adapter(name),
            estimator: learned.estimator(name),
            exact: None,
            media_part_tokens: limits::MEDIA_PART_TOKENS.0,
        }
    }
}

/// The limits of each backend of a pool, in admission's form.
pub fn limits_of(pool: &sluice_config::Pool) -> BackendLimits {
    BackendLimits {
        slots: pool.slots,
        tokens: pool.tokens.fixed().map(|tokens| tokens.0),
        prefill_tokens: pool.prefill_tokens.map(|tokens| tokens.0),
        long_prefix: pool.long_prefix.map(|long| LongPrefix { threshold: long.threshold.0, slots: long.slots }),
    }
}
