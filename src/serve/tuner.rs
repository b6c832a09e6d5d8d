//! Runs the online tuner every second, puts its limits in force, and carries out the orders of
//! operators.
//!
//! Two tasks: one for the pools, and a slower one for the engines' metrics pages, which only
//! diagnoses use. Both end with the gateway or the lead. Neither delays a request.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::app::App;
use super::tuning::Tuning;
use crate::admin::unsaved::UnsavedOrder;
use crate::admin::{TunerControl, TunerError, TunerOrder};
use crate::config::TunerMode;
use crate::experiment::Phase;
use crate::fleet;
use crate::online::change::EXPERIMENT;
use crate::online::{EngineSample, Event, Order, TunerReport};

const INTERVAL: Duration = Duration::from_secs(1);
/// Prometheus' usual interval for the engines' metrics pages: vLLM writes the page on the thread
/// that also serves requests.
const LOOK_INTERVAL: Duration = Duration::from_secs(15);
/// Why the tuner makes no changes during such an experiment.
const COMPARES: &str = "while an experiment compares pools";
/// Most pages that are read at once.
const LOOKS_AT_ONCE: usize = 16;

impl App {
    pub(super) async fn keep_tuning(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let app = Arc::clone(&self);
            // A look takes the lock of admission, and a change rebuilds the routing table.
            match tokio::task::spawn_blocking(move || app.tune()).await {
                Ok(orders) => self.carry_out(orders),
                Err(error) => tracing::error!(%error, "the tuner failed"),
            }
        }
    }

    pub(super) async fn keep_watching_engines(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            tokio::select! {
                () = self.look_at_engines() => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
        }
    }

    async fn look_at_engines(&self) {
        if !self.tuning.tuner.lock().has_work() {
            return;
        }
        let limit = self.config.load().health.probe_timeout;
        let (mut pages, room) = (JoinSet::new(), Arc::new(Semaphore::new(LOOKS_AT_ONCE)));
        for pool in self.admission.view() {
            for backend in pool.backends.into_iter().filter(|backend| backend.in_rotation()) {
                let (room, pool) = (Arc::clone(&room), Arc::clone(&pool.name));
                pages.spawn(async move {
                    // Never closed.
                    let _room = room.acquire().await;
                    (pool, backend.name, fleet::scrape(&backend.address, limit).await)
                });
            }
        }
        while let Some(page) = pages.join_next().await {
            let Ok((pool, backend, page)) = page else { continue };
            let sample = page.as_ref().and_then(EngineSample::of);
            let now = self.tuning.started.elapsed();
            self.tuning.tuner.lock().note_engine(&pool, &backend, sample, now);
        }
    }

    /// One look at the pools. Returns orders about engines.
    fn tune(&self) -> Vec<Order> {
        let Tuning { tuner, observer, started, .. } = &self.tuning;
        if !tuner.lock().has_work() {
            return Vec::new();
        }
        let (view, fleet) = (self.admission.view(), self.fleet.views());
        let engines = self.engine_states(&view, &fleet);
        let (waits, stopped) = (self.why_engines_wait(), self.learned.experiments.why_stopped(EXPERIMENT));
        let (changed, orders, events) = {
            let mut tuner = tuner.lock();
            let now = started.elapsed();
            let hindered = tuner.hinder(self.compares_pools().then_some(COMPARES), observer, now);
            let mut orders = stopped.map_or_else(Vec::new, |why| tuner.experiment_stopped(&why, observer, now));
            observer.note_waiting(&self.admission.waiting(Instant::now()), now);
            let changed = tuner.step(&view, observer, now) || hindered;
            orders.extend(tuner.step_engines(&engines, waits, observer, now));
            let ids = view.iter().flat_map(|pool| pool.backends.iter().map(|backend| backend.id));
            self.admission.set_trials(&ids.zip(tuner.trials(&engines)).collect::<Vec<_>>());
            (changed || orders.contains(&Order::Configure), orders, tuner.take_events())
        };
        // A restart is written down before it is begun.
        let begins = orders.iter().any(|order| matches!(order, Order::Restart { .. }));
        self.follow(changed, events);
        if begins {
            self.tuning.save_or_warn();
        }
        orders
    }

    /// Whether an experiment compares pools or backends, whose limits must stay as they are
    /// meanwhile.
    fn compares_pools(&self) -> bool {
        let all = self.learned.experiments.all();
        let runs = all.iter().filter(|one| one.state.phase() == Phase::Running && *one.plan.name != *EXPERIMENT);
        runs.flat_map(|experiment| &experiment.plan.arms).any(|arm| arm.pool.is_some())
    }

    /// Puts the tuner's changed limits and experiment in force, and keeps the events.
    pub(super) fn follow(&self, changed: bool, events: Vec<Event>) {
        if changed {
            self.put_limits(|config| self.tuning.tuner.lock().put(config));
        }
        self.tuning.keep(events);
    }
}

impl TunerControl for App {
    fn tuner(&self) -> TunerReport {
        self.tuning.report()
    }

    fn order_tuner(&self, order: TunerOrder) -> Result<TunerReport, TunerError> {
        let Tuning { tuner, observer, started, .. } = &self.tuning;
        let now = started.elapsed();
        let mut tuner = tuner.lock();
        let changed = match order {
            TunerOrder::Freeze => tuner.freeze(Some("by an operator".to_owned()), observer, now),
            TunerOrder::Resume => tuner.freeze(None, observer, now),
            TunerOrder::Reset => {
                tuner.reset(&self.config.load(), observer, now);
                true
            }
            TunerOrder::Approve(id) => {
                if tuner.mode() != TunerMode::Approve {
                    return Err(TunerError::NotWaiting { mode: tuner.mode().word().to_owned() });
                }
                if let Some(why) = tuner.report().frozen {
                    return Err(TunerError::Frozen { why });
                }
                if !tuner.approve(&id) {
                    let report = tuner.report();
                    let known: Vec<_> = report.proposals().map(|proposal| proposal.id.as_str()).collect();
                    return Err(TunerError::UnknownProposal { id, known: known.join(", ") });
                }
                false
            }
        };
        let events = tuner.take_events();
        drop(tuner);
        self.follow(changed, events);
        self.tuning.save().map_err(|error| UnsavedOrder {
            folder: self.config.load().fleet.state.clone(),
            reason: error.to_string(),
        })?;
        Ok(self.tuning.report())
    }
}
