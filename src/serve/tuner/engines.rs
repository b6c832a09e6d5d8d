//! The gateway as the deployment that the online tuner drives: restarts through the fleet, and
//! simulations that forecast a change.
//!
//! Bounds: one restart, one simulation of flags and one of limits at a time. A simulation takes a
//! thread for some seconds of CPU time. It runs only while objectives are missed: for flags a few
//! times an hour, for limits before each trial.

use std::collections::BTreeMap;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::TunerService;
use sluice_config::{ArgValue, Backend, engine_name};
use sluice_core::engines::EngineKind;
use sluice_core::vllm::flags::table::setting;
use sluice_fleet::driver::EngineSettings;
use sluice_fleet::{EngineView, RestartError, RestartRequest, Trial};
use sluice_gateway::pool::PoolView;
use sluice_lab::forecast::{forecast, forecast_limits};
use sluice_lab::scenario::argv;
use sluice_lab::{EngineSetup, Lab};
use sluice_online::drive::{self, Deployment, Parts};
use sluice_online::engines::flags::{EngineFlag, Flags};
use sluice_online::engines::forecast::{EngineAnswer, EngineQuestion};
use sluice_online::engines::look::{EngineState, Restarted};
use sluice_online::event::Event;
use sluice_online::limits::forecast::{LimitsAnswer, LimitsQuestion};
use sluice_online::tuner::Tuner;

const POLL: Duration = Duration::from_millis(500);
const SERVES: &str = "serve";

/// Only a refusal of the settings counts against the change. Any other error blocks the change for
/// now.
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

#[derive(Clone)]
pub(super) struct Live(pub(super) Arc<TunerService>);

impl Deployment for Live {
    fn now(&self) -> Duration {
        self.0.state.started.elapsed()
    }

    fn parts(&self) -> Parts<'_> {
        let now = Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
        Parts {
            config: self.0.core.config.load_full(),
            admission: &self.0.core.admission,
            waiting: self.0.core.admission.waiting(Instant::now()),
            experiments: &self.0.core.learned.experiments,
            observer: &self.0.state.observer,
            minute: now.hour().unsigned_abs() as u16 * 60 + now.minute().unsigned_abs() as u16,
        }
    }

    fn tuner(&self) -> impl DerefMut<Target = Tuner> {
        self.0.state.tuner.lock()
    }

    fn engines(&self, view: &[PoolView]) -> Vec<EngineState> {
        let (config, fleet) = (self.0.core.config.load(), self.0.core.fleet.views());
        let mut states = Vec::new();
        for pool in view {
            let own = config.pools.iter().find(|own| own.name == *pool.name);
            for backend in &pool.backends {
                let name = format!("{}/{}", pool.name, backend.name);
                let engine = fleet.iter().find(|engine| engine.backend == name);
                let configured = own.and_then(|own| own.backends.iter().find(|own| own.name == *backend.name));
                states.push(EngineState {
                    // The flags of a process concern all its ranks, so no trial can compare them.
                    flags: engine
                        .zip(configured)
                        .filter(|_| backend.address.rank.is_none())
                        .map(|(engine, configured)| self.0.flags_of(engine, configured)),
                    started_in: engine.and_then(|engine| engine.start_seconds).map(Duration::from_secs_f64),
                    serves: backend.in_rotation() && engine.is_none_or(|engine| engine.step == SERVES),
                    ..EngineState::of(pool, backend)
                });
            }
        }
        states
    }

    fn follow(&mut self, changed: bool, events: Vec<Event>) {
        self.0.follow(changed, events);
    }

    fn save(&mut self) {
        self.0.state.save_or_warn();
    }

    fn restart(&mut self, engine: String, change: (EngineFlag, f64), crowded: bool) {
        let mut live = self.clone();
        tokio::spawn(async move {
            let outcome = live.0.restart_for_tuner(&engine, change, crowded).await;
            let ended = tokio::task::spawn_blocking(move || drive::restarted(&mut live, outcome)).await;
            if let Err(error) = ended {
                tracing::error!(%error, "the tuner failed");
            }
        });
    }

    fn simulate(&mut self, question: EngineQuestion) {
        let mut live = self.clone();
        tokio::task::spawn_blocking(move || {
            let seed = question.requests.len() as u64;
            let answer = live.0.lab().map_or_else(EngineAnswer::default, |lab| forecast(&lab, &question, seed));
            drive::answered(&mut live, &answer);
        });
    }

    fn simulate_limits(&mut self, question: LimitsQuestion) {
        let mut live = self.clone();
        tokio::task::spawn_blocking(move || {
            let seed = question.requests.len() as u64;
            let answer = live.0.lab().map_or_else(LimitsAnswer::default, |lab| forecast_limits(&lab, &question, seed));
            drive::limits_answered(&mut live, &question, &answer);
        });
    }
}

impl TunerService {
    /// The given values of an engine's flags, and known defaults.
    fn flags_of(&self, engine: &EngineView, backend: &Backend) -> Flags {
        let given = given(backend.engine, &engine.settings);
        if backend.engine.rules().flags.is_some() {
            return given;
        }
        let mut flags = self.setup(backend, &given).map(|setup| setup.flags()).unwrap_or_default();
        // vLLM has these defaults on every machine.
        flags.entry(EngineFlag::LongPrefillTokenThreshold).or_insert(0.0);
        flags.entry(EngineFlag::PrefillScheduleInterval).or_insert(1.0);
        flags.extend(given);
        flags
    }

    /// The engine of a backend, if the configuration describes it for a simulation.
    fn setup(&self, backend: &Backend, given: &Flags) -> Option<EngineSetup> {
        // The simulator has the speed of vLLM, so other kinds of engine have no forecast.
        backend.engine.rules().flags.is_none().then_some(())?;
        let config = self.core.config.load();
        let simulation = &config.tuner.simulation;
        let (gpu, model) = (simulation.gpu.as_deref()?, simulation.model.as_deref()?);
        let configured = backend.target.args()?;
        let given = given.iter().map(|(flag, value)| (flag.name().to_owned(), flag.written(*value))).collect();
        let settings = EngineSettings { args: configured.clone() }.with(&given);
        let words = argv(model, &settings.args);
        EngineSetup::vllm(&backend.name, gpu, simulation.host.as_deref(), model, &words).ok()
    }

    /// Restarts an engine with another value of a flag, and waits for the end.
    async fn restart_for_tuner(&self, engine: &str, (flag, value): (EngineFlag, f64), hold: bool) -> Restarted {
        let Some(name) = self.kind_of(engine).and_then(|kind| name_in(kind, flag)) else {
            return Restarted::Blocked(format!("its kind of engine has no flag for {}", flag.name()));
        };
        let set = BTreeMap::from([(name.to_owned(), flag.written(value))]);
        let returns = self.state.tuner.lock().engine_change().is_some_and(|change| change.from == value);
        let trial = Some(if returns { Trial::Return } else { Trial::Begin });
        let started = match self
            .core
            .fleet
            .restart(engine, RestartRequest { set, hold, trial, ..RestartRequest::default() })
            .await
        {
            Ok(started) => started.change,
            Err(error) => return refused(&error),
        };
        loop {
            tokio::time::sleep(POLL).await;
            let views = self.core.fleet.views();
            let Some(view) = views.iter().find(|view| view.backend == engine) else {
                return Restarted::Blocked("it is no longer managed".to_owned());
            };
            let Some(ended) = view.last_change.as_ref().filter(|ended| ended.id >= started) else { continue };
            let why = || ended.why.clone().unwrap_or_else(|| ended.outcome.clone());
            return match ended.outcome.as_str() {
                "done" => Restarted::Done,
                // Requests took longer than the drain, so the engine was not changed.
                "aborted" => Restarted::Blocked(why()),
                _ => Restarted::Failed(why()),
            };
        }
    }

    /// Old engines are kept asleep for the change under way only.
    pub(super) fn end_trials(&self) {
        let under_way = self.state.tuner.lock().engine_change().cloned();
        self.core.fleet.end_trials(|engine| {
            let parts = engine.split_once('/').zip(under_way.as_ref());
            parts.is_some_and(|((pool, own), change)| change.pool == pool && change.backends.iter().any(|of| of == own))
        });
    }

    fn kind_of(&self, engine: &str) -> Option<EngineKind> {
        let (pool, backend) = engine.split_once('/')?;
        let config = self.core.config.load();
        let pool = config.pools.iter().find(|own| own.name == pool)?;
        pool.backends.iter().find(|own| own.name == backend).map(|own| own.engine)
    }

    /// A lab with all engines; `None` unless the configuration describes each of them.
    fn lab(&self) -> Option<Lab> {
        let (config, views) = (self.core.config.load_full(), self.core.fleet.views());
        let mut engines: Vec<EngineSetup> = Vec::new();
        for (pool, backend) in config.pools.iter().flat_map(|pool| pool.backends.iter().map(move |own| (pool, own))) {
            let name = format!("{}/{}", pool.name, engine_name(&backend.name, backend.rank));
            let given = views.iter().find(|view| view.backend == name);
            let given = given.map(|view| self::given(backend.engine, &view.settings));
            if !engines.iter().any(|engine| engine.backend == backend.name) {
                engines.push(self.setup(backend, &given.unwrap_or_default())?);
            }
        }
        Some(Lab { launched: true, ..Lab::new(sluice_config::Config::clone(&config), engines, Vec::new()) })
    }
}

/// The name that engines of a kind have for a flag of vLLM; `None`: they have none.
fn name_in(kind: EngineKind, flag: EngineFlag) -> Option<&'static str> {
    let Some(table) = kind.rules().flags else { return Some(flag.name()) };
    table.tuned.iter().find(|(vllm, _)| *vllm == flag.name()).map(|(_, own)| *own)
}

/// Flags in an engine's settings, which are `name=value` words.
fn given(kind: EngineKind, settings: &str) -> Flags {
    let flag = |word: &str| {
        let (name, value) = word.split_once('=')?;
        let Some(table) = kind.rules().flags else {
            let flag = EngineFlag::named(&setting(name).0)?;
            return Some((flag, ArgValue::read(flag.name(), value).number_of(flag.name())?));
        };
        let full = table.full_name(name)?;
        let (vllm, _) = table.tuned.iter().find(|(_, own)| *own == full)?;
        // SGLang writes -1 for a chunk without limit.
        let value = ArgValue::read(full, value).number().filter(|value| *value > 0.0)?;
        Some((EngineFlag::named(vllm)?, value))
    };
    settings.split_whitespace().filter_map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_config::{Config, Machine, Surroundings};

    #[test]
    fn flags_are_read_from_the_settings_of_an_engine() {
        let found = given(
            EngineKind::Vllm,
            "max-num-seqs=16 served-model-name=[\"a\",\"b\"] gpu_memory_utilization=0.5 max-num-batched-tokens=x",
        );
        assert_eq!(found, Flags::from([(EngineFlag::MaxNumSeqs, 16.0), (EngineFlag::GpuMemoryUtilization, 0.5)]));
        let found = given(EngineKind::Vllm, "max-num-seqs=nan gpu-memory-utilization=inf max_num_batched_tokens=8k");
        assert_eq!(found, Flags::from([(EngineFlag::MaxNumBatchedTokens, 8_000.0)]));
        let found = given(EngineKind::Sglang, "max_running_requests=32 chunked-prefill-size=-1 max-num-seqs=4 tp=2");
        assert_eq!(found, Flags::from([(EngineFlag::MaxNumSeqs, 32.0)]));
        assert_eq!(given(EngineKind::LlamaCpp, "np=4"), Flags::from([(EngineFlag::MaxNumSeqs, 4.0)]));
        assert_eq!(given(EngineKind::Serial, "max-num-seqs=4"), Flags::new());
        for (kind, flag, name) in [
            (EngineKind::Vllm, EngineFlag::PrefillScheduleInterval, Some("prefill-schedule-interval")),
            (EngineKind::Sglang, EngineFlag::GpuMemoryUtilization, Some("mem-fraction-static")),
            (EngineKind::LlamaCpp, EngineFlag::GpuMemoryUtilization, None),
        ] {
            assert_eq!(name_in(kind, flag), name);
        }
    }

    #[test]
    fn an_engine_that_another_program_runs_is_not_simulated_with_the_defaults_of_vllm() {
        let text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\n\
                    url = \"http://127.0.0.1:9\"\n[[pool.backend]]\nname = \"b\"\n\
                    launch = { command = [\"vllm\"], port = 8001, args = { max-num-seqs = 16 } }\n";
        let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
        let config = Config::parse(text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config;
        let [url, launched] = &config.pools[0].backends[..] else { panic!("two backends") };
        assert_eq!(url.target.args(), None);
        assert_eq!(launched.target.args().map(BTreeMap::len), Some(1));
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
