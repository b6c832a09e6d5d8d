//! Tunes one engine of a running gateway while the other engines serve clients.
//!
//! The engine leaves the rotation, restarts with each setting and is measured directly. The gateway
//! stops and starts it ([`BenchEngine`]), so the gateway's checks, roll-back and journal apply.
//! Only flags of vLLM can be tried, because changes of the gateway's keys would affect clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use super::system::{RealSystem, Watch};
use super::{REQUEST_LIMIT, WARM_UP};
use crate::backend::{Backend, Started, search_goal};
use crate::error::TuneError;
use crate::setting::{RestartCost, Setting, variant};
use crate::space::Space;
use sluice_bench::search::SearchGoal;
use sluice_bench::{LoadClient, RunPlan};
use sluice_config::ArgValue;
use sluice_lab::{Measure, Scenario, Variant};

/// Values of vLLM flags.
pub type Flags = BTreeMap<String, ArgValue>;

/// An engine that a gateway runs and has taken out of rotation. The caller implements it, because
/// this crate may not use the gateway's admin API.
pub trait BenchEngine: Clone + Watch {
    /// The name of the backend.
    fn name(&self) -> &str;

    /// The address, `http://host:port`.
    fn url(&self) -> &str;

    /// Restarts the engine with the configured flags, overridden by `flags`. Returns the reason if
    /// it does not start.
    ///
    /// # Errors
    /// The gateway does not respond, or refuses the restart for another reason than the setting.
    fn restart(&mut self, flags: &Flags) -> impl Future<Output = Result<Option<String>, TuneError>>;
}

/// One engine of a running gateway as a backend.
#[derive(Debug)]
pub struct InPlace<E> {
    scenario: Scenario,
    measures: Vec<Measure>,
    engine: E,
    traffic: RunPlan,
    /// The overrides of the running engine; `None` after a failed start.
    running: Option<Flags>,
    runs: Arc<AtomicU32>,
}

impl<E: BenchEngine> InPlace<E> {
    /// A backend for `engine`, which must run with the configured flags.
    ///
    /// # Errors
    /// The space has a key of the gateway, a measure exists only for simulated engines, there is
    /// not exactly one `[[traffic]]`, or no model is known.
    pub fn new(scenario: Scenario, space: &Space, measures: Vec<Measure>, engine: E) -> Result<Self, TuneError> {
        if let Some(key) = space.keys().find(|key| RestartCost::of(key) == RestartCost::None) {
            let text =
                format!("{key} is a key of the gateway, which serves meanwhile: tune it with --real or by simulation");
            return Err(TuneError::Deployment(text));
        }
        if let Some(measure) = measures.iter().find(|measure| measure.is_simulated()) {
            let text = format!("{measure} is known of simulated engines only; leave it out");
            return Err(TuneError::Goal(text));
        }
        let (config, traffic) = scenario.deployment(&Variant::default())?;
        let Ok([mut traffic]) = <[RunPlan; 1]>::try_from(traffic) else {
            let text = "give one [[traffic]]; several kinds of requests are classes of it";
            return Err(TuneError::Goal(text.to_owned()));
        };
        if config.models.is_empty() {
            let text =
                "no model is known: give config = \"FILE\", the gateway's own, or name the model in its [[model]]";
            return Err(TuneError::Deployment(text.to_owned()));
        }
        traffic.scrape = vec![engine.url().to_owned()];
        let (running, runs) = (Some(Flags::new()), Arc::default());
        Ok(Self { scenario, measures, engine, traffic, running, runs })
    }

    fn system(&self) -> Result<RealSystem<E>, TuneError> {
        let limit =
            self.scenario.file.client_timeout.map_or(REQUEST_LIMIT, |period: sluice_core::base::Period| period.0);
        let client = LoadClient::new(&[self.engine.url().to_owned()], self.traffic.workload.api, limit)?;
        Ok(RealSystem::new(self.engine.clone(), self.traffic.clone(), client, &self.measures, &self.runs))
    }
}

impl<E: BenchEngine> Backend for InPlace<E> {
    type System = RealSystem<E>;

    const REAL: bool = true;

    async fn start(&mut self, setting: &Setting) -> Result<Started<RealSystem<E>>, TuneError> {
        let began = Instant::now();
        let variant = variant(setting)?;
        let mut flags: Flags = variant.args.into_iter().collect();
        flags.extend(variant.engine.get(self.engine.name()).cloned().unwrap_or_default());
        if self.running.as_ref() == Some(&flags) {
            return Ok(Started::Up { system: self.system()?, seconds: 0.0 });
        }
        self.running = None;
        let refused = |reason: String, took: Duration| {
            Ok(Started::Refused { reason, seconds: took.as_secs_f64(), foreseen: false })
        };
        if let Some(reason) = self.engine.restart(&flags).await? {
            return refused(reason, began.elapsed());
        }
        self.running = Some(flags);
        let system = self.system()?;
        match system.warm_up(WARM_UP.0, WARM_UP.1).await {
            Ok(()) => Ok(Started::Up { system, seconds: began.elapsed().as_secs_f64() }),
            Err(TuneError::Died(reason)) => {
                self.running = None;
                refused(reason, began.elapsed())
            }
            Err(error) => Err(error),
        }
    }

    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError> {
        search_goal(std::slice::from_ref(&self.traffic), attainment, requests, seed)
    }
}
