//! The laboratory as a backend: the gateway's request path, simulated engines, virtual time.
//!
//! A start is not simulated. It costs the time in the simulator's start-up log, with a warm compile
//! cache if an engine with the same compiled flags was started before. Settings that vLLM refuses
//! while checking them cost nothing. A refusal after measuring the memory costs
//! [`SECONDS_TO_REFUSAL`].

use std::collections::BTreeSet;
use std::task::{Context, Poll, Waker};

use crate::backend::{Backend, Started, System, cache_hits, cache_notes, is_cache_full, search_goal};
use crate::error::TuneError;
use crate::setting::{RestartCost, Setting, variant};
use sluice_bench::result::record::ServerSide;
use sluice_bench::search::{Judge, SearchGoal, SystemUnderTest, Trial, TrialStats};
use sluice_bench::{PromptTokens, RunResult};
use sluice_config::ArgValue;
use sluice_lab::measure::Measured;
use sluice_lab::rate::Simulated;
use sluice_lab::{Lab, LabError, LabRun, Measure, Scenario, run};
use sluice_sim::process::refusal::Stage;
use sluice_sim::process::startup::{Event, Surroundings, plan};

/// Seconds until vLLM reports too little memory: imports, engine process, weights of an 8B model.
const SECONDS_TO_REFUSAL: f64 = 30.0;
/// Share of the time with requests that wait for an adapter slot, above which a note says so.
const DEFERRED_NOTE: f64 = 0.02;

/// The laboratory as a backend.
#[derive(Debug)]
pub struct Laboratory {
    scenario: Scenario,
    measures: Vec<Measure>,
    compiled: BTreeSet<String>,
    /// The setting of the running engines, without the gateway's keys.
    running: Option<Setting>,
}

impl Laboratory {
    /// A laboratory of a scenario. `measures`: the measures of a run, the objective first.
    pub fn new(scenario: Scenario, measures: Vec<Measure>) -> Self {
        Self { scenario, measures, compiled: BTreeSet::new(), running: None }
    }

    fn lab(&self, setting: &Setting) -> Result<Lab, LabError> {
        let mut lab = self.scenario.lab(&variant(setting)?)?;
        // A single engine gets every request, with any token ids, and writing these would be half
        // of the work.
        for traffic in lab.traffic.iter_mut().filter(|_| lab.engines.len() == 1) {
            if let PromptTokens::Ids(ids) = &mut traffic.workload.tokens {
                *ids = ids.start..ids.start + 1;
            }
        }
        Ok(lab)
    }

    /// Engine seconds of the start. Engines start in parallel, so the slowest one counts.
    fn start_seconds(&mut self, lab: &Lab, setting: &Setting) -> f64 {
        let compiled: String = setting
            .iter()
            .filter(|(key, _)| RestartCost::of(key) == RestartCost::Compile)
            .map(|(key, value)| format!("{key}={value} "))
            .collect();
        let cached = !self.compiled.insert(compiled);
        let around = Surroundings { cached, cache: "", arguments: "", address: "" };
        let wait = |event: &Event| if let Event::Wait(time) = event { time.as_secs_f64() } else { 0.0 };
        let starts = lab.engines.iter().map(|engine| plan(&engine.sim, &around).iter().map(wait).sum::<f64>());
        starts.fold(0.0, f64::max)
    }
}

impl Backend for Laboratory {
    type System = SimulatedSystem;

    async fn start(&mut self, setting: &Setting) -> Result<Started<SimulatedSystem>, TuneError> {
        let lab = match self.lab(setting) {
            Ok(lab) => lab,
            Err(LabError::Engine { source, .. }) => {
                let text = source.to_string();
                let line =
                    text.lines().map(str::trim).rfind(|line| !line.is_empty() && !line.starts_with("For further"));
                let foreseen = source.stage() == Stage::Settings;
                if !foreseen {
                    self.running = None;
                }
                let seconds = if foreseen { 0.0 } else { SECONDS_TO_REFUSAL };
                return Ok(Started::Refused { reason: reason(line), seconds, foreseen });
            }
            Err(LabError::Flags { source, .. }) => {
                return Ok(Started::Refused { reason: source.to_string(), seconds: 0.0, foreseen: true });
            }
            Err(error) => return Err(error.into()),
        };
        let flags: Setting =
            setting.iter().filter(|(key, _)| RestartCost::of(key) != RestartCost::None).map(copied).collect();
        let runs = self.running.as_ref() == Some(&flags);
        let seconds = if runs { 0.0 } else { self.start_seconds(&lab, setting) };
        self.running = Some(flags);
        let simulated = Simulated::new(&lab, true);
        Ok(Started::Up {
            system: SimulatedSystem { lab, simulated, measures: self.measures.clone(), last: None },
            seconds,
        })
    }

    fn search_goal(&self, attainment: f64, requests: usize, seed: u64) -> Result<SearchGoal, TuneError> {
        search_goal(&self.lab(&Setting::new())?.traffic, attainment, requests, seed)
    }
}

fn copied((key, value): (&String, &ArgValue)) -> (String, ArgValue) {
    (key.clone(), value.clone())
}

fn reason(line: Option<&str>) -> String {
    line.and_then(|line| line.split(" [type=").next()).unwrap_or_default().to_owned()
}

/// A laboratory with one setting.
#[derive(Debug)]
pub struct SimulatedSystem {
    lab: Lab,
    simulated: Simulated,
    measures: Vec<Measure>,
    last: Option<LabRun>,
}

impl SystemUnderTest for SimulatedSystem {
    type Error = TuneError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, TuneError> {
        self.last = None;
        Ok(self.simulated.run(trial, judge).await?)
    }
}

impl SimulatedSystem {
    fn last_run(&self) -> Option<&LabRun> {
        self.last.as_ref().or_else(|| self.simulated.last())
    }
}

impl System for SimulatedSystem {
    fn last(&self) -> Option<&RunResult> {
        self.last_run().map(|run| &run.result)
    }

    fn group(&self, group: usize) -> String {
        self.simulated.group(group).to_owned()
    }

    async fn observe(&mut self, seed: u64) -> Result<(Vec<f64>, f64), TuneError> {
        let run = run(&self.lab, seed)?;
        let measured = Measured::of(&run);
        let values = self.measures.iter().map(|measure| measured.value(measure)).collect();
        drop(measured);
        let seconds = run.result.duration;
        self.last = Some(run);
        Ok((values, seconds))
    }

    async fn stress(&mut self, _: u64) -> Result<f64, TuneError> {
        Ok(0.0)
    }

    fn is_kv_full(&self) -> bool {
        self.last_run().is_some_and(|run| is_cache_full(&sides(run)))
    }

    fn hit_rate(&self) -> Option<f64> {
        self.last_run().and_then(|run| cache_hits(&sides(run)))
    }

    fn notes(&self) -> Vec<String> {
        let Some(run) = self.last_run() else { return Vec::new() };
        let mut notes = Vec::new();
        let duration = run.result.duration.max(1e-9);
        let deferred = run.engines.iter().map(|engine| engine.deferred / duration).fold(0.0, f64::max);
        if deferred > DEFERRED_NOTE {
            let most = run.engines.iter().map(|engine| engine.deferred_peak).max().unwrap_or(0);
            notes.push(format!(
                "requests waited for an adapter slot in {:.0} % of the time, up to {most} at once: raise max-loras",
                deferred * 100.0
            ));
        }
        notes.extend(cache_notes(&sides(run)));
        notes
    }
}

fn sides(run: &LabRun) -> Vec<&ServerSide> {
    run.engines.iter().map(|engine| &engine.side).collect()
}

/// Runs a future that never waits.
pub fn at_once<T>(future: impl Future<Output = Result<T, TuneError>>) -> Result<T, TuneError> {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(TuneError::Goal("the laboratory waits for something".to_owned())),
    }
}
