//! A change of one flag on all engines of a pool, and the experiments that test it.
//!
//! The *canary* changes first; it is compared with the *control*. It serves no client until it has
//! served copies of requests, so an engine that fails under load harms no client. Until the change
//! ends, requests load a changed engine at most as much as copies have proved
//! ([`EngineChange::proved`]), or a little more while requests wait. Before the comparison, all
//! engines serve their backlog, because a backlog in one arm would favour the other arm. In the
//! comparison, the gateway draws an arm for each request. [`phase`](super::phase) has the order of
//! the stages.

use serde::{Deserialize, Serialize};

use super::flags::EngineFlag;
use super::proof::Load;
use crate::limits::PoolLimits;
use sluice_config::{Arm, Config, Experiment, Guardrail, ModelScope, Shadow, Sticky, Traffic};
use sluice_core::base::PoolId;

/// The name of the tuner's experiments.
pub const EXPERIMENT: &str = "sluice-tuner";
const CONTROL: &str = "control";
const CANARY: &str = "canary";
/// The experiment stops once the canary's share of failed requests exceeds the control's by this.
const GUARD_ERRORS: f64 = 0.01;
/// Copies on the canary, as a multiple of an engine's share of all requests. Above 1, so that too
/// much load shows before the canary serves clients.
const COPIES_LOAD: f64 = 2.0;
/// Large, because the limits of the pool bound the copies.
const COPIES_IN_FLIGHT: u32 = 1_024;
const COPIES_PER_SECOND: f64 = 10_000.0;

/// The stage of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The canary restarts with the new value.
    Canary,
    /// The canary gets copies of requests.
    Copies,
    /// All engines serve the backlog of the restart.
    Recovery,
    /// The canary is compared with the control.
    Compared,
    /// The other engines restart with the new value.
    Promotion,
    /// Changed engines restart with the old value.
    Return,
}

/// A change of one flag on all engines of a pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineChange {
    /// The number of the change, different for each.
    pub number: u64,
    /// The pool.
    pub pool: String,
    /// All backends of the pool, first the canary, then the control.
    pub backends: Vec<String>,
    /// The flag.
    pub flag: EngineFlag,
    /// The old value.
    pub from: f64,
    /// The new value.
    pub to: f64,
    /// Limits of the pool that belong to the new value, if any.
    #[serde(default)]
    pub limits: Option<PoolLimits>,
    /// Whether `limits` are in force from the beginning, because they also suit the engines that
    /// serve while one restarts. Otherwise they are in force while the canary serves requests.
    #[serde(default)]
    pub limits_first: bool,
    /// Mean loss of a request before the change.
    #[serde(default)]
    pub loss_before: f64,
    /// Simulated fall of the mean loss; `None`: not simulated.
    pub forecast: Option<f64>,
    /// Whether to restart engines even if requests then wait.
    #[serde(default)]
    pub crowded: bool,
    /// Backends that have the new value, or are about to.
    pub changed: Vec<String>,
    /// The load of copies that the canary has sustained.
    #[serde(default)]
    pub proved: Load,
}

impl EngineChange {
    /// The key in events.
    pub fn key(&self) -> String {
        format!("pool.{}.engine.{}", self.pool, self.flag.name())
    }

    /// The first engine to change.
    pub fn canary(&self) -> &str {
        &self.backends[0]
    }

    /// The engine to compare the canary with.
    pub fn control(&self) -> &str {
        &self.backends[1]
    }

    /// The next engine to restart. It gets the new value, or in [`Stage::Return`] the old value.
    pub(super) fn next(&self, stage: Stage) -> Option<&String> {
        match stage {
            Stage::Return => self.changed.last(),
            _ => self.backends.iter().find(|backend| !self.changed.contains(backend)),
        }
    }

    pub(super) fn leave_out(&mut self, backend: &str) {
        self.changed.retain(|other| other != backend);
    }

    /// Bound on the load of requests on a backend; `None`: the tuner sets none.
    pub(super) fn bound(&self, stage: Stage, backend: &str) -> Option<Load> {
        let is_changed = self.changed.iter().any(|changed| changed == backend);
        match stage {
            Stage::Canary | Stage::Copies => (is_changed && backend == self.canary()).then(Load::default),
            _ => is_changed.then_some(self.proved),
        }
    }

    /// Whether this mean loss on the canary is below the loss before the change. Always true
    /// without limits, where the comparison with the control decides alone.
    pub(super) fn improves(&self, loss: f64) -> bool {
        self.limits.is_none() || loss < self.loss_before
    }

    pub(super) fn limits_at(&self, stage: Stage) -> Option<PoolLimits> {
        let serves = matches!(stage, Stage::Recovery | Stage::Compared | Stage::Promotion);
        self.limits.filter(|_| serves || self.limits_first)
    }

    pub(crate) fn labels() -> [String; 2] {
        [CONTROL, CANARY].map(|arm| format!("{EXPERIMENT}/{arm}"))
    }

    pub(super) fn experiment(&self, stage: Stage, config: &Config) -> Option<Experiment> {
        let pool = config.pools.iter().position(|pool| pool.name == self.pool)?;
        let arm = |name: &str, weight: f64, backends: &[String]| Arm {
            name: name.to_owned(),
            weight,
            shadow: None,
            model: None,
            pool: Some(self.pool.clone()),
            backends: backends.to_vec(),
        };
        let share = 1.0 / self.backends.len() as f64;
        let copied = (COPIES_LOAD * share).min(1.0);
        let (canary, others) = self.backends.split_at(1);
        let arms = match stage {
            Stage::Copies => {
                let shadow = Shadow { share: copied, in_flight: COPIES_IN_FLIGHT, per_second: COPIES_PER_SECOND };
                vec![arm(CONTROL, 100.0, others), Arm { shadow: Some(shadow), ..arm(CANARY, 0.0, canary) }]
            }
            Stage::Compared => {
                let each = 100.0 * share;
                let mut arms = vec![arm(CONTROL, each, &others[..1]), arm(CANARY, each, canary)];
                if others.len() > 1 {
                    arms.push(arm("others", 100.0 - 2.0 * each, &others[1..]));
                }
                arms
            }
            Stage::Canary | Stage::Recovery | Stage::Promotion | Stage::Return => return None,
        };
        Some(Experiment {
            name: EXPERIMENT.to_owned(),
            models: ModelScope::All,
            keys: Vec::new(),
            classes: vec![PoolId::new(pool)],
            sticky: Sticky::Request,
            header: "x-user-id".to_owned(),
            salt: Some(format!("{} {:?}", self.number, stage)),
            layer: EXPERIMENT.to_owned(),
            traffic: Traffic { from: 0.0, to: 1.0 },
            begins: None,
            ramp: Vec::new(),
            running: true,
            min_effect: 0.05,
            confidence: 0.95,
            guardrail: Guardrail { errors: GUARD_ERRORS, slo_misses: 1.0 },
            promote: false,
            arms,
        })
    }
}

#[cfg(test)]
mod tests {
    use sluice_config::{Machine, Surroundings};

    use super::*;

    #[test]
    fn the_canary_serves_no_client_while_it_gets_copies_at_twice_its_share_of_the_load() {
        let text = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:1\"\n";
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let config = Config::parse(text, "test", &[], &around).unwrap().config;
        for (engines, share) in [(2, 1.0), (4, 0.5), (8, 0.25)] {
            let change = EngineChange {
                number: 1,
                pool: "p".to_owned(),
                backends: (0..engines).map(|engine| format!("e{engine}")).collect(),
                flag: EngineFlag::MaxNumSeqs,
                from: 8.0,
                to: 16.0,
                limits: None,
                limits_first: false,
                loss_before: 0.0,
                forecast: None,
                crowded: false,
                changed: Vec::new(),
                proved: Load::default(),
            };
            let [control, canary] = change.experiment(Stage::Copies, &config).unwrap().arms.try_into().unwrap();
            assert_eq!((control.weight, canary.weight), (100.0, 0.0));
            assert_eq!(
                (control.backends, canary.backends),
                (change.backends[1..].to_vec(), change.backends[..1].to_vec())
            );
            assert_eq!(canary.shadow.unwrap().share, share, "{engines}");
            let compared = change.experiment(Stage::Compared, &config).unwrap();
            assert!(compared.arms.iter().all(|arm| arm.shadow.is_none()));
            assert_eq!(compared.arms.iter().map(|arm| arm.weight).sum::<f64>(), 100.0);
        }
    }
}
