//! Runs the online tuner every second, puts its limits in force, and carries out the orders of
//! operators.
//!
//! Two tasks: one for the pools, and a slower one for the engines' metrics pages, which only
//! diagnoses use. Both end with the gateway or the lead. Neither delays a request.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::app::App;
use super::engine_tuning::Live;
use super::tuning::Tuning;
use crate::admin::unsaved::UnsavedOrder;
use crate::admin::{TunerControl, TunerError, TunerOrder};
use crate::fleet;
use crate::online::drive::{self, LOOK_INTERVAL, PAGES_INTERVAL};
use crate::online::event::Event;
use crate::online::observe::engines::EngineSample;
use crate::online::tuner::report::TunerReport;
use sluice_config::TunerMode;

/// Most pages that are read at once.
const LOOKS_AT_ONCE: usize = 16;

impl App {
    pub(super) async fn keep_tuning(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let mut live = Live(self);
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            let mut looking = live.clone();
            // A look takes the lock of admission, and a change rebuilds the routing table.
            match tokio::task::spawn_blocking(move || drive::look(&mut looking)).await {
                Ok(orders) => drive::carry_out(&mut live, orders),
                Err(error) => tracing::error!(%error, "the tuner failed"),
            }
        }
    }

    pub(super) async fn keep_watching_engines(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(PAGES_INTERVAL) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            tokio::select! {
                () = self.look_at_engines() => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
        }
    }

    async fn look_at_engines(self: &Arc<Self>) {
        let limit = self.config.load().health.probe_timeout;
        let (mut pages, room) = (JoinSet::new(), Arc::new(Semaphore::new(LOOKS_AT_ONCE)));
        for (pool, backend) in drive::pages(&Live(Arc::clone(self))) {
            let room = Arc::clone(&room);
            pages.spawn(async move {
                // Never closed.
                let _room = room.acquire().await;
                (pool, backend.name, fleet::scrape(&backend.address, limit).await)
            });
        }
        while let Some(page) = pages.join_next().await {
            let Ok((pool, backend, page)) = page else { continue };
            let sample = page.as_ref().and_then(EngineSample::of);
            let now = self.tuning.started.elapsed();
            self.tuning.tuner.lock().note_engine(&pool, &backend, sample, now);
        }
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
