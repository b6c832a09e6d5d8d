//! A configured experiment, in the form that assignment reads.
//!
//! A plan is built from a valid configuration, so nothing fails here. Names of pools and backends
//! are positions in the configuration. The *identity* of a plan says whether measurements under an
//! earlier configuration belong to the same experiment.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::unit::UnitHash;
use sluice_config::{Config, Guardrail, ModelScope, OTHER_CLASS, RampStep, Shadow, Sticky, Traffic};
use sluice_core::base::ModelId;

/// One experiment.
#[derive(Clone, Debug)]
pub struct ExperimentPlan {
    /// The name.
    pub name: Arc<str>,
    /// The arms; the first is the control.
    pub arms: Vec<ArmPlan>,
    /// The kind of unit that stays in one arm.
    pub sticky: Sticky,
    /// The header for [`Sticky::Header`], in lower case.
    pub header: Box<str>,
    /// Finds the arm of a unit.
    pub hash: UnitHash,
    /// When the ramp begins; `None`: at the first start.
    pub begins: Option<Timestamp>,
    /// Whether the experiment runs without being started by an operator.
    pub running: bool,
    /// A hash of everything that decides in which arm a unit is, and how the arms serve.
    pub identity: u64,
    /// How the experiment is judged.
    pub rules: Rules,
    /// The classes of the configuration, and at the end the class for requests in none.
    pub classes: Vec<String>,
    /// Whether the same pools and backends serve all arms.
    pub shares_pools: bool,
    models: ModelScope,
    /// Whether requests for undeclared models take part.
    undeclared: bool,
    keys: Vec<String>,
    homes: Vec<usize>,
    traffic: Traffic,
    ramp: Vec<RampStep>,
}

/// How an experiment is judged.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Changes up to this share are too small to matter.
    pub min_effect: f64,
    /// Confidence of all verdicts together.
    pub confidence: f64,
    /// The bounds at which an arm is stopped at once.
    pub guardrail: Guardrail,
    /// Whether a better arm gets all units at once.
    pub promote: bool,
}

/// One arm.
#[derive(Clone, Debug)]
pub struct ArmPlan {
    /// The name.
    pub name: Arc<str>,
    /// `EXPERIMENT/ARM`: the label in metrics and in the response header.
    pub label: Arc<str>,
    /// Share of the units that take part.
    pub share: f64,
    /// The budget of copies of a shadow arm, which has no units.
    pub shadow: Option<Shadow>,
    /// Draws from the bound of the arm before up to this bound belong to this arm.
    until: f64,
    /// The model name to send upstream, and the declared model.
    pub model: Option<(Arc<str>, ModelId)>,
    /// Position of the pool that serves the arm.
    pub pool: Option<usize>,
    /// Positions of the backends in that pool; empty: all.
    pub backends: Vec<usize>,
}

impl ExperimentPlan {
    /// All experiments of a configuration.
    pub fn all(config: &Config) -> Vec<Self> {
        config.experiments.iter().map(|experiment| Self::new(experiment, config)).collect()
    }

    fn new(experiment: &sluice_config::Experiment, config: &Config) -> Self {
        let mut until = 0.0;
        let arms: Vec<ArmPlan> = experiment
            .arms
            .iter()
            .map(|arm| {
                until += arm.weight / 100.0;
                ArmPlan::new(experiment, arm, until, config)
            })
            .collect();
        let serves_any = |pool: usize| config.pools[pool].models == ModelScope::All;
        let keeps_models = |arm: &ArmPlan| arm.model.is_none() && arm.pool.is_none_or(serves_any);
        let salt = experiment.salt.as_deref().unwrap_or(&experiment.name);
        Self {
            name: experiment.name.as_str().into(),
            undeclared: experiment.models == ModelScope::All && arms.iter().all(keeps_models),
            arms,
            sticky: experiment.sticky,
            header: experiment.header.to_ascii_lowercase().into(),
            hash: UnitHash::new(&experiment.layer, salt),
            begins: experiment.begins,
            running: experiment.running,
            identity: identity(experiment, salt, config),
            rules: Rules {
                min_effect: experiment.min_effect,
                confidence: experiment.confidence,
                guardrail: experiment.guardrail.clone(),
                promote: experiment.promote,
            },
            classes: config.classes.iter().map(|class| &*class.name).chain([OTHER_CLASS]).map(str::to_owned).collect(),
            shares_pools: shares_pools(experiment, config),
            models: experiment.models.clone(),
            keys: experiment.keys.clone(),
            homes: experiment.classes.iter().map(|pool| pool.index()).collect(),
            traffic: experiment.traffic.clone(),
            ramp: experiment.ramp.clone(),
        }
    }

    /// Whether requests of this model (`None`: undeclared), key and home pool (the position) may
    /// take part.
    pub fn is_for(&self, model: Option<ModelId>, key: Option<&str>, home: usize) -> bool {
        model.map_or(self.undeclared, |model| self.models.includes(model))
            && (self.keys.is_empty() || key.is_some_and(|key| self.keys.iter().any(|name| name == key)))
            && (self.homes.is_empty() || self.homes.contains(&home))
    }

    /// The share of units that take part this long after the ramp began.
    pub fn exposure(&self, since: Duration) -> f64 {
        if self.ramp.is_empty() {
            return 1.0;
        }
        self.ramp.iter().take_while(|step| step.after <= since).last().map_or(0.0, |step| step.share)
    }

    /// The position of a place in the layer within the experiment's part, in `[0, 1)`.
    pub fn position(&self, place: f64) -> Option<f64> {
        let Traffic { from, to } = self.traffic;
        (from <= place && place < to).then(|| (place - from) / (to - from))
    }

    /// The arm of a draw.
    pub fn arm_of(&self, draw: f64) -> usize {
        let has_units = |arm: &ArmPlan| arm.shadow.is_none();
        let found = self.arms.iter().position(|arm| has_units(arm) && draw < arm.until);
        // Rounding may leave the end of the last range a little below 1.
        found.or_else(|| self.arms.iter().rposition(has_units)).unwrap_or_default()
    }
}

fn shares_pools(experiment: &sluice_config::Experiment, config: &Config) -> bool {
    let serves = |pool: &sluice_config::Pool, arm: &sluice_config::Arm| match (&arm.pool, &arm.model) {
        (Some(name), _) => pool.name == *name,
        _ if pool.arms_only => false,
        (None, Some(name)) => config.model_named(name).is_some_and(|model| pool.models.includes(model)),
        (None, None) => match &experiment.models {
            ModelScope::All => true,
            ModelScope::Only(models) => models.iter().any(|model| pool.models.includes(*model)),
        },
    };
    let Some((first, others)) = experiment.arms.split_first() else { return true };
    others.iter().all(|arm| {
        arm.backends == first.backends && config.pools.iter().all(|pool| serves(pool, arm) == serves(pool, first))
    })
}

/// The identity, built from names, so that changed positions in the file do not matter.
fn identity(experiment: &sluice_config::Experiment, salt: &str, config: &Config) -> u64 {
    let models = match &experiment.models {
        ModelScope::All => vec!["*"],
        ModelScope::Only(models) => models.iter().map(|id| config.models[id.index()].name.as_str()).collect(),
    };
    let mut what = format!("{salt:?} {} {:?} {models:?}", experiment.sticky.word(), experiment.header);
    for sluice_config::Arm { name, weight, shadow, model, pool, backends } in &experiment.arms {
        what += &format!(" {name:?} {weight} {model:?} {pool:?} {backends:?}");
        if let Some(shadow) = shadow {
            what += &format!(" {}", shadow.share);
        }
    }
    twox_hash::XxHash3_64::oneshot(what.as_bytes())
}

impl ArmPlan {
    /// Whether requests of both arms may be on one engine; `false` if only one arm names a pool,
    /// because the other arm's pools depend on prompt lengths.
    pub(super) fn shares_engines(&self, other: &Self) -> bool {
        let any_of_both = self.backends.is_empty() || other.backends.is_empty();
        self.pool == other.pool && (any_of_both || self.backends.iter().any(|one| other.backends.contains(one)))
    }

    fn new(experiment: &sluice_config::Experiment, arm: &sluice_config::Arm, until: f64, config: &Config) -> Self {
        let pool = arm.pool.as_deref().and_then(|name| config.pool_named(name)).map(|pool| pool.index());
        let backends = pool.map_or(&[][..], |pool| &config.pools[pool].backends);
        let position = |name: &String| backends.iter().position(|backend| backend.name == *name);
        let model = arm.model.as_deref().and_then(|name| config.model_named(name));
        Self {
            name: arm.name.as_str().into(),
            label: format!("{}/{}", experiment.name, arm.name).into(),
            share: arm.weight / 100.0,
            shadow: arm.shadow,
            until,
            model: model.map(|id| (config.models[id.index()].name.as_str().into(), id)),
            pool,
            backends: arm.backends.iter().filter_map(position).collect(),
        }
    }
}
