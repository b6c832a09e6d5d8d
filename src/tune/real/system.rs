//! A running deployment, which the load generator gives trials and runs.
//!
//! If an engine ends during a trial ([`Watch`]), the trial ends at once, because the setting cannot
//! serve. Each run shifts the token ids, because a repeated load would find the prompts in the
//! prefix cache. Lengths and times depend only on the seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use tokio::sync::Mutex;

use crate::backend::{System, cache_hits, cache_notes, is_cache_full};
use crate::error::TuneError;
use sluice_bench::result::record::ServerSide;
use sluice_bench::run::profile::{self, ProfileError};
use sluice_bench::search::{Groups, Judge, LiveTrial, SystemUnderTest, Trial, TrialStats};
use sluice_bench::{Arrival, Extent, LoadClient, PromptTokens, RunPlan, RunResult, run};
use sluice_fleet::TrialEngines;
use sluice_lab::Measure;
use sluice_lab::measure::Measured;

/// Requests in flight in the worst load: more than engines run at once by default, except on the
/// largest GPUs.
const STRESS: u32 = 512;
/// Requests in a trace, as in vLLM's `auto_tune.sh`; each adds tens of megabytes.
const TRACED: u64 = 100;
/// Upper bound of the shift of token ids.
const MOVES: u32 = 1_000;

/// Watches engines while they are under load.
pub trait Watch {
    /// Runs `load` and returns its output, unless an engine ends first.
    ///
    /// # Errors
    /// [`TuneError::Died`] with the reason, if known.
    fn unless_lost<T>(&self, load: impl Future<Output = T>) -> impl Future<Output = Result<T, TuneError>>;
}

/// Engines that the tuner runs.
#[derive(Clone, Debug)]
pub struct OwnEngines(pub(super) Arc<Mutex<TrialEngines>>);

impl Watch for OwnEngines {
    async fn unless_lost<T>(&self, load: impl Future<Output = T>) -> Result<T, TuneError> {
        let engines = self.0.lock().await;
        let failure = tokio::select! {
            done = load => match engines.ill().await {
                None => return Ok(done),
                Some(failure) => failure,
            },
            failure = engines.lost() => failure,
        };
        Err(TuneError::Died(failure.to_string()))
    }
}

/// A running deployment with a setting.
#[derive(Debug)]
pub struct RealSystem<W = OwnEngines> {
    watch: W,
    plan: RunPlan,
    client: Arc<LoadClient>,
    groups: Arc<Groups>,
    measures: Vec<Measure>,
    last: Option<RunResult>,
    runs: Arc<AtomicU32>,
}

impl<W: Watch> RealSystem<W> {
    pub(super) fn new(
        watch: W,
        plan: RunPlan,
        client: LoadClient,
        measures: &[Measure],
        runs: &Arc<AtomicU32>,
    ) -> Self {
        let (groups, runs) = (Arc::new(Groups::of(&plan.workload)), Arc::clone(runs));
        Self { watch, plan, client: Arc::new(client), groups, measures: measures.to_vec(), last: None, runs }
    }

    fn fresh(&self) -> RunPlan {
        let mut plan = self.plan.clone();
        let by = self.runs.fetch_add(1, Relaxed).wrapping_add(std::process::id()) % MOVES;
        if let PromptTokens::Ids(ids) = &mut plan.workload.tokens {
            ids.start += by.min((ids.end - ids.start) / 2);
        }
        plan
    }

    fn sides(&self) -> Vec<&ServerSide> {
        self.last.iter().flat_map(|result| &result.servers).collect()
    }

    /// Sends unmeasured requests, because the first ones take longer.
    pub(super) async fn warm_up(&self, requests: u64, concurrency: u32) -> Result<(), TuneError> {
        let arrival = Arrival::ClosedLoop { concurrency };
        let extent = Extent::Requests(requests);
        let plan = RunPlan { arrival, extent, sessions: None, scrape: Vec::new(), ..self.fresh() };
        self.watch.unless_lost(run(&plan, &self.client, &Arc::default())).await??;
        Ok(())
    }
}

impl<W: Watch> SystemUnderTest for RealSystem<W> {
    type Error = TuneError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, TuneError> {
        self.last = None;
        let live = LiveTrial::new(&self.fresh(), trial, judge, &self.groups);
        let (stats, result) = self.watch.unless_lost(live.run(&self.client, judge)).await??;
        self.last = Some(result);
        Ok(stats)
    }
}

impl<W: Watch> System for RealSystem<W> {
    fn last(&self) -> Option<&RunResult> {
        self.last.as_ref()
    }

    fn group(&self, group: usize) -> String {
        self.groups.name(group).to_owned()
    }

    async fn observe(&mut self, seed: u64) -> Result<(Vec<f64>, f64), TuneError> {
        self.last = None;
        let mut plan = self.fresh();
        plan.workload.seed = seed;
        let result = self.watch.unless_lost(run(&plan, &self.client, &Arc::default())).await??;
        let measured = Measured::of_real(&result);
        let values = self.measures.iter().map(|measure| measured.value(measure)).collect();
        drop(measured);
        let seconds = result.duration;
        self.last = Some(result);
        Ok((values, seconds))
    }

    async fn stress(&mut self, seed: u64) -> Result<f64, TuneError> {
        self.last = None;
        let arrival = Arrival::ClosedLoop { concurrency: STRESS };
        let extent = Extent::Requests(2 * u64::from(STRESS));
        let mut plan = RunPlan { arrival, extent, sessions: None, ..self.fresh() };
        plan.workload.seed = seed;
        let result = self.watch.unless_lost(run(&plan, &self.client, &Arc::default())).await??;
        let seconds = result.duration;
        self.last = Some(result);
        Ok(seconds)
    }

    async fn profile(&mut self, rate: Option<f64>) -> Result<Option<String>, TuneError> {
        let engines = self.client.to(&self.plan.scrape)?;
        match profile::start(&engines).await {
            Ok(()) => {}
            Err(ProfileError::Missing(_)) => return Ok(None),
            Err(error) => return Ok(Some(format!("no trace was recorded: {error}"))),
        }
        let arrival = rate.map_or(self.plan.arrival.clone(), |rate| Arrival::Poisson { rate });
        let plan = RunPlan { arrival, extent: Extent::Requests(TRACED), scrape: Vec::new(), ..self.fresh() };
        let sent = self.watch.unless_lost(run(&plan, &self.client, &Arc::default())).await;
        let stopped = profile::stop(&engines).await;
        sent??;
        Ok(Some(match stopped {
            Ok(()) => format!("the profiler traced {TRACED} requests; the trace is where --profiler-config says"),
            Err(error) => format!("the trace may be missing: {error}"),
        }))
    }

    fn is_kv_full(&self) -> bool {
        is_cache_full(&self.sides())
    }

    fn hit_rate(&self) -> Option<f64> {
        cache_hits(&self.sides())
    }

    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = cache_notes(&self.sides()).into_iter().collect();
        for (status, reason) in self.client.reasons() {
            notes.push(format!("the first response with status {status} said: {reason}"));
        }
        notes
    }
}
