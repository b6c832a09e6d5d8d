//! A change of one flag of all engines of a pool, and the experiments by which it is tried.
//!
//! ```text
//!   the canary restarts -> copies -> recovery -> compared with one that was not changed -> the others restart, one by one
//!                 |           |          |                  |                                  |
//!                 `-----------+----------+------------------+----------------------------------'
//!                                        `--> all that were changed restart as before
//! ```
//!
//! From its restart until it has served its copies, the canary serves no request, not even those that wait when it starts: an
//! engine that crashes, hangs or fails under the load costs none. Afterwards requests load it, and every other engine that
//! is changed, at most as much as the copies did ([`EngineChange::proved`]), until the change has ended. All engines first
//! serve those that waited meanwhile, for five minutes at most: with a backlog on one side only, the other would seem to be better.
//! While it is compared, the gateway draws for each request which of the two engines serves it.

use serde::{Deserialize, Serialize};

use crate::flags::EngineFlag;
use crate::limits::PoolLimits;
use crate::proof::Load;
use sluice_core::base::PoolId;
use sluice_gateway::config::{Arm, Config, Experiment, Guardrail, ModelScope, Shadow, Sticky, Traffic};

/// The name of the tuner's experiments.
pub const EXPERIMENT: &str = "sluice-tuner";
/// The arm of an engine that was not changed.
const CONTROL: &str = "control";
/// The arm of the engine that was.
const CANARY: &str = "canary";
/// More requests that fail than in the control by this share stop the canary at once.
const GUARD_ERRORS: f64 = 0.01;
/// The load of the canary while it gets copies, as a multiple of its share of all requests: what it cannot bear shall show before
/// it serves clients.
const COPIES_LOAD: f64 = 2.0;
/// Copies in flight at most; what bounds them are the limits of the pool.
const COPIES_IN_FLIGHT: u32 = 1_024;
/// Copies begun in a second at most.
const COPIES_PER_SECOND: f64 = 10_000.0;

/// What a change is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The canary restarts with the change.
    Canary,
    /// It gets copies of requests.
    Copies,
    /// All engines serve what waited meanwhile.
    Recovery,
    /// It is compared.
    Compared,
    /// The other engines restart with the change.
    Promotion,
    /// Engines that were changed restart as they were.
    Return,
}

/// See the header of this file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineChange {
    /// Different for each change.
    pub number: u64,
    /// The pool.
    pub pool: String,
    /// All of its backends.
    pub backends: Vec<String>,
    /// The flag.
    pub flag: EngineFlag,
    /// Its value before.
    pub from: f64,
    /// And after.
    pub to: f64,
    /// Limits of the pool that go with it: in force from when the canary serves requests until the change is taken back.
    #[serde(default)]
    pub limits: Option<PoolLimits>,
    /// They are in force as long as the change lasts, because they also suit the engines that serve while one restarts.
    #[serde(default)]
    pub limits_first: bool,
    /// The mean loss of a request before.
    #[serde(default)]
    pub loss_before: f64,
    /// By how much the mean loss on engines with it shall be lower than on those without, where that was simulated.
    pub forecast: Option<f64>,
    /// Whether its gain pays even if requests must wait while an engine restarts, because the others have no room for them.
    #[serde(default)]
    pub crowded: bool,
    /// Backends whose engines were restarted with it, or are about to be.
    pub changed: Vec<String>,
    /// What it is doing.
    pub stage: Stage,
    /// What the canary has sustained of copies.
    #[serde(default)]
    pub proved: Load,
}

impl EngineChange {
    /// The key for events.
    pub fn key(&self) -> String {
        format!("pool.{}.engine.{}", self.pool, self.flag.name())
    }

    /// The engine that is changed first.
    pub fn canary(&self) -> &str {
        &self.backends[0]
    }

    /// The engine with which it is compared.
    pub fn control(&self) -> &str {
        &self.backends[1]
    }

    /// The next engine to restart: with the change while it is promoted, without it while it is taken back.
    pub fn next(&self) -> Option<&String> {
        match self.stage {
            Stage::Return => self.changed.last(),
            _ => self.backends.iter().find(|backend| !self.changed.contains(backend)),
        }
    }

    /// How much requests may load an engine of the pool; `None`: the tuner does not bound it.
    pub fn bound(&self, backend: &str) -> Option<Load> {
        let is_changed = self.changed.iter().any(|changed| changed == backend);
        match self.stage {
            Stage::Canary | Stage::Copies => (is_changed && backend == self.canary()).then(Load::default),
            _ => is_changed.then_some(self.proved),
        }
    }

    /// Whether this mean loss on the canary is an improvement over what was before, other limits included.
    pub fn improves(&self, loss: f64) -> bool {
        self.limits.is_none() || loss < self.loss_before
    }

    /// The limits of the pool that must be in force now, if it changes them.
    pub fn limits_in_force(&self) -> Option<PoolLimits> {
        let serves = matches!(self.stage, Stage::Recovery | Stage::Compared | Stage::Promotion);
        self.limits.filter(|_| serves || self.limits_first)
    }

    /// The labels of the arms of [`experiment`](Self::experiment): control and canary.
    pub fn labels() -> [String; 2] {
        [CONTROL, CANARY].map(|arm| format!("{EXPERIMENT}/{arm}"))
    }

    /// The experiment that must run now, if any.
    pub fn experiment(&self, config: &Config) -> Option<Experiment> {
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
        let arms = match self.stage {
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
            salt: Some(format!("{} {:?}", self.number, self.stage)),
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
    use sluice_gateway::config::{Machine, Surroundings};

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
                stage: Stage::Copies,
                proved: Load::default(),
            };
            let [control, canary] = change.experiment(&config).unwrap().arms.try_into().unwrap();
            assert_eq!((control.weight, canary.weight), (100.0, 0.0));
            assert_eq!(
                (control.backends, canary.backends),
                (change.backends[1..].to_vec(), change.backends[..1].to_vec())
            );
            assert_eq!(canary.shadow.unwrap().share, share, "{engines}");
            let compared = EngineChange { stage: Stage::Compared, ..change }.experiment(&config).unwrap();
            assert!(compared.arms.iter().all(|arm| arm.shadow.is_none()));
            assert_eq!(compared.arms.iter().map(|arm| arm.weight).sum::<f64>(), 100.0);
        }
    }
}
