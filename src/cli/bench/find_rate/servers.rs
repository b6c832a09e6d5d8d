//! Runs the trials of a search against the servers that the flags name, with a progress line, until
//! a signal arrives.
//!
//! `bench::search` has the trial itself ([`LiveTrial`]).

use std::sync::Arc;

use super::super::args::BenchArgs;
use super::super::plan::{Setup, paced};
use super::super::signals::StopSignals;
use crate::cli::line::Line;
use sluice_bench::search::{Groups, Judge, LiveTrial, SystemUnderTest, Trial, TrialStats};
use sluice_bench::{BenchError, RunPlan, Slo};

pub(super) enum SearchError {
    Bench(BenchError),
    Interrupted,
}

pub(super) struct Servers<'a> {
    args: &'a BenchArgs,
    setup: &'a Setup,
    plan: RunPlan,
    groups: Arc<Groups>,
    stop: &'a mut StopSignals,
    runs: usize,
}

impl<'a> Servers<'a> {
    pub(super) fn new(args: &'a BenchArgs, setup: &'a Setup, objectives: Vec<Slo>, stop: &'a mut StopSignals) -> Self {
        let arrival = paced(1.0, args.load.burstiness.0, args.load.burst_size);
        let plan = RunPlan { arrival, scrape: Vec::new(), ..setup.plan.clone() };
        Self { args, setup, plan, groups: Arc::new(Groups::one(objectives)), stop, runs: 0 }
    }
}

impl SystemUnderTest for Servers<'_> {
    type Error = SearchError;

    async fn run(&mut self, trial: &Trial, judge: &mut Judge) -> Result<TrialStats, SearchError> {
        self.runs += 1;
        let live = LiveTrial::new(&self.plan, trial, judge, &self.groups);
        let progress = live.progress().clone();
        let title = format!("run {}, {}", self.runs, super::text::load(&trial.load));
        let quiet = self.args.output.disable_tqdm;
        let line = (!quiet).then(|| Line::start(&title, live.plan().extent, progress.clone()));
        let mut halted = false;
        let result = {
            let mut running = std::pin::pin!(live.run(&self.setup.client, judge));
            loop {
                tokio::select! {
                    result = &mut running => break result,
                    () = self.stop.received(), if !halted => {
                        halted = true;
                        progress.stop();
                    }
                }
            }
        };
        drop(line);
        let (stats, _) = result.map_err(SearchError::Bench)?;
        if halted { Err(SearchError::Interrupted) } else { Ok(stats) }
    }
}
