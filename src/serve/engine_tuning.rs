//! Carries out the online tuner's orders about engines: restarts through the fleet, and simulations
//! that forecast a change.
//!
//! At most one restart, one simulation of flags and one of limits run at a time. A simulation takes
//! a thread for some seconds of CPU time, and only while objectives are missed: for flags a few
//! times an hour, for limits before each trial.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::app::App;
use crate::config::{ArgValue, Backend};
use crate::experiment::Phase;
use crate::fleet::driver::EngineSettings;
use crate::fleet::{EngineView, RestartError, RestartRequest};
use crate::lab::forecast::{forecast, forecast_limits};
use crate::lab::scenario::argv;
use crate::lab::{EngineSetup, Lab};
use crate::online::change::EXPERIMENT;
use crate::online::forecast::{Answer, LimitsQuestion, Question};
use crate::online::{EngineFlag, EngineState, Flags, Load, Order, Restarted};
use crate::pool::PoolView;
use crate::vllm::flags::table::setting;

const POLL: Duration = Duration::from_millis(500);
/// The step of an engine that serves.
const SERVES: &str = "serve";

/// The result of a refused restart for the tuner: only settings that cannot work speak against the
/// change.
fn refused(error: &RestartError) -> Restarted {
    match error {
        RestartError::Blocked(_)
        | RestartError::NotSaved(_)
        | RestartError::NotManaged(_)
        | RestartError::ShuttingDown
        | RestartError::Outdated => Restarted::Blocked(error.to_string()),
        RestartError::InvalidSettings(_) | RestartError::Secret(_) => Restarted::Failed(error.to_string()),
    }
}

impl App {
    /// Carries out orders of the tuner. Returns at once.
    pub(super) fn carry_out(self: &Arc<Self>, orders: Vec<Order>) {
        for order in orders {
            let app = Arc::clone(self);
            match order {
                Order::Configure => {}
                Order::Restart { engine, flag, value, crowded } => {
                    tokio::spawn(async move {
                        let outcome = app.restart_for_tuner(&engine, (flag, value), crowded).await;
                        app.report_restart(outcome).await;
                    });
                }
                Order::Simulate(question) => {
                    tokio::task::spawn_blocking(move || app.simulate(&question));
                }
                Order::SimulateLimits(question) => {
                    tokio::task::spawn_blocking(move || app.simulate_limits(&question));
                }
            }
        }
    }

    /// Why no engine may be restarted now.
    pub(super) fn why_engines_wait(&self) -> Option<&'static str> {
        let windows = &self.config.load().tuner.windows;
        let now = Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
        let minute = now.hour().unsigned_abs() as u16 * 60 + now.minute().unsigned_abs() as u16;
        if !windows.is_empty() && !windows.iter().any(|window| window.contains(minute)) {
            return Some("engines are restarted in tuner.windows only");
        }
        let all = self.learned.experiments.all();
        let runs = all.iter().any(|one| one.state.phase() == Phase::Running && *one.plan.name != *EXPERIMENT);
        runs.then_some("an experiment of an operator runs")
    }

    /// The states of all engines, for the tuner.
    pub(super) fn engine_states(&self, view: &[PoolView], fleet: &[EngineView]) -> Vec<EngineState> {
        let config = self.config.load();
        let of = |pool: &PoolView| config.pools.iter().find(|own| own.name == *pool.name).map(|own| &own.backends);
        let mut states = Vec::new();
        for pool in view {
            for backend in &pool.backends {
                let name = format!("{}/{}", pool.name, backend.name);
                let engine = fleet.iter().find(|engine| engine.backend == name);
                let configured = of(pool).and_then(|own| own.iter().find(|own| own.name == *backend.name));
                states.push(EngineState {
                    pool: pool.name.to_string(),
                    backend: backend.name.to_string(),
                    flags: engine.zip(configured).map(|(engine, configured)| self.flags_of(engine, configured)),
                    waiting: pool.queue_length,
                    used: Load::new(backend.used.slots, backend.used.tokens),
                    copies: Load::new(backend.copies.0, backend.copies.1),
                    started_in: engine.and_then(|engine| engine.start_seconds).map(Duration::from_secs_f64),
                    serves: backend.in_rotation() && engine.is_none_or(|engine| engine.step == SERVES),
                });
            }
        }
        states
    }

    /// The values of an engine's flags: given values, and defaults as far as they are known.
    fn flags_of(&self, engine: &EngineView, backend: &Backend) -> Flags {
        let given = given(&engine.settings);
        let mut flags = self.setup(backend, &given).map(|setup| setup.flags()).unwrap_or_default();
        // vLLM's default on every machine.
        flags.entry(EngineFlag::LongPrefillTokenThreshold).or_insert(0.0);
        flags.extend(given);
        flags
    }

    /// The engine of a backend for a simulation, if the configuration describes it.
    fn setup(&self, backend: &Backend, given: &Flags) -> Option<EngineSetup> {
        let config = self.config.load();
        let simulation = &config.tuner.simulation;
        let (gpu, model) = (simulation.gpu.as_deref()?, simulation.model.as_deref()?);
        let given = given.iter().map(|(flag, value)| (flag.name().to_owned(), flag.written(*value))).collect();
        let settings = EngineSettings { args: backend.target.args().cloned().unwrap_or_default() }.with(&given);
        let words = argv(model, &settings.args);
        EngineSetup::vllm(&backend.name, gpu, simulation.host.as_deref(), model, &words).ok()
    }

    /// Restarts an engine with another value of a flag, and waits until the restart has ended.
    async fn restart_for_tuner(&self, engine: &str, (flag, value): (EngineFlag, f64), hold: bool) -> Restarted {
        let set = BTreeMap::from([(flag.name().to_owned(), flag.written(value))]);
        let started = match self.fleet.restart(engine, RestartRequest { set, hold, ..RestartRequest::default() }).await
        {
            Ok(started) => started.change,
            Err(error) => return refused(&error),
        };
        loop {
            tokio::time::sleep(POLL).await;
            let views = self.fleet.views();
            let Some(view) = views.iter().find(|view| view.backend == engine) else {
                return Restarted::Blocked("it is no longer managed".to_owned());
            };
            let Some(ended) = view.last_change.as_ref().filter(|ended| ended.id >= started) else { continue };
            let why = || ended.why.clone().unwrap_or_else(|| ended.outcome.clone());
            return match ended.outcome.as_str() {
                "done" => Restarted::Done,
                // Requests took longer than the drain, so nothing was changed.
                "aborted" => Restarted::Blocked(why()),
                _ => Restarted::Failed(why()),
            };
        }
    }

    async fn report_restart(self: &Arc<Self>, outcome: Restarted) {
        let app = Arc::clone(self);
        let ended = tokio::task::spawn_blocking(move || {
            let tuning = &app.tuning;
            let (orders, events) = {
                let mut tuner = tuning.tuner.lock();
                let orders = tuner.restarted(outcome, &tuning.observer, tuning.started.elapsed());
                (orders, tuner.take_events())
            };
            app.follow(orders.contains(&Order::Configure), events);
            app.tuning.save_or_warn();
            orders
        });
        match ended.await {
            Ok(orders) => self.carry_out(orders),
            Err(error) => tracing::error!(%error, "the tuner failed"),
        }
    }

    /// Simulates changes of flags, and lets the tuner decide.
    fn simulate(&self, question: &Question) {
        let tuning = &self.tuning;
        let answer =
            self.lab().map_or_else(Answer::default, |lab| forecast(&lab, question, question.requests.len() as u64));
        let engines = self.engine_states(&self.admission.view(), &self.fleet.views());
        let (changed, events) = {
            let mut tuner = tuning.tuner.lock();
            let waits = self.why_engines_wait();
            let changed = tuner.answered(&answer, &engines, waits, &tuning.observer, tuning.started.elapsed());
            (changed, tuner.take_events())
        };
        self.follow(changed, events);
        tuning.save_or_warn();
    }

    /// Simulates other limits, and lets the tuner decide.
    fn simulate_limits(&self, question: &LimitsQuestion) {
        let tuning = &self.tuning;
        let seed = question.requests.len() as u64;
        let answer = self.lab().map_or_else(Answer::default, |lab| forecast_limits(&lab, question, seed));
        let (changed, events) = {
            let mut tuner = tuning.tuner.lock();
            let changed = tuner.limits_answered(question, &answer, &tuning.observer, tuning.started.elapsed());
            (changed, tuner.take_events())
        };
        self.follow(changed, events);
        tuning.save_or_warn();
    }

    /// A simulation of this deployment; `None` unless the configuration describes all engines.
    fn lab(&self) -> Option<Lab> {
        let (config, views) = (self.config.load_full(), self.fleet.views());
        let mut engines: Vec<EngineSetup> = Vec::new();
        for (pool, backend) in config.pools.iter().flat_map(|pool| pool.backends.iter().map(move |own| (pool, own))) {
            let name = format!("{}/{}", pool.name, backend.name);
            let given = views.iter().find(|view| view.backend == name).map(|view| given(&view.settings));
            if !engines.iter().any(|engine| engine.backend == backend.name) {
                engines.push(self.setup(backend, &given.unwrap_or_default())?);
            }
        }
        Some(Lab { launched: true, ..Lab::new(crate::config::Config::clone(&config), engines, Vec::new()) })
    }
}

/// The flags in an engine's settings, which are `name=value` words.
fn given(settings: &str) -> Flags {
    let flag = |word: &str| {
        let (name, value) = word.split_once('=')?;
        let flag = EngineFlag::named(&setting(name).0)?;
        Some((flag, ArgValue::read(flag.name(), value).number_of(flag.name())?))
    };
    settings.split_whitespace().filter_map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_from_the_settings_of_an_engine() {
        let found = given(
            "max-num-seqs=16 served-model-name=[\"a\",\"b\"] gpu_memory_utilization=0.5 max-num-batched-tokens=x",
        );
        assert_eq!(found, Flags::from([(EngineFlag::MaxNumSeqs, 16.0), (EngineFlag::GpuMemoryUtilization, 0.5)]));
        let found = given("max-num-seqs=nan gpu-memory-utilization=inf max_num_batched_tokens=8k");
        assert_eq!(found, Flags::from([(EngineFlag::MaxNumBatchedTokens, 8_000.0)]));
    }

    #[test]
    fn only_settings_that_cannot_work_speak_against_a_change() {
        for error in [RestartError::NotManaged("p/a".to_owned()), RestartError::ShuttingDown, RestartError::Outdated] {
            assert_eq!(refused(&error), Restarted::Blocked(error.to_string()));
        }
        let secret = RestartError::Secret("hf-token".to_owned());
        assert_eq!(refused(&secret), Restarted::Failed(secret.to_string()));
    }
}
