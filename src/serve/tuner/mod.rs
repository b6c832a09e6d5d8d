//! Runs the online tuner every second, puts its limits in force, and carries out the orders of
//! operators.
//!
//! One task looks at the pools. A slower task reads the engines' metrics pages, which only
//! diagnoses use. Both end when the gateway ends or loses the lead. Neither delays a request.

mod state;
mod service;
mod engines;

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};

use sluice_online::drive::{self, LOOK_INTERVAL, PAGES_INTERVAL};
use sluice_online::observe::engines::EngineSample;

use engines::Live;
pub(crate) use service::TunerService;
pub(crate) use state::TunerState;

const LOOKS_AT_ONCE: usize = 16;

pub(crate) fn start(service: &Arc<TunerService>, end: &watch::Receiver<bool>) -> [JoinHandle<()>; 2] {
    [
        tokio::spawn(keep_tuning(Arc::clone(service), end.clone())),
        tokio::spawn(keep_watching_engines(Arc::clone(service), end.clone())),
    ]
}

async fn keep_tuning(service: Arc<TunerService>, mut end: watch::Receiver<bool>) {
    let mut live = Live(service);
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
        let mut looking = live.clone();
        // A look takes the lock of admission, and a change rebuilds the routing table, so both run
        // on a thread that may block.
        match tokio::task::spawn_blocking(move || drive::look(&mut looking)).await {
            Ok(orders) => {
                live.0.end_trials();
                drive::carry_out(&mut live, orders);
            }
            Err(error) => tracing::error!(%error, "the tuner failed"),
        }
    }
}

async fn keep_watching_engines(service: Arc<TunerService>, mut end: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(PAGES_INTERVAL) => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
        tokio::select! {
            () = look_at_engines(&service) => {}
            _ = end.wait_for(|ending| *ending) => return,
        }
    }
}

async fn look_at_engines(service: &Arc<TunerService>) {
    let limit = service.core.config.load().health.probe_timeout;
    let (mut pages, room) = (JoinSet::new(), Arc::new(Semaphore::new(LOOKS_AT_ONCE)));
    for (pool, backend) in drive::pages(&Live(Arc::clone(service))) {
        let room = Arc::clone(&room);
        pages.spawn(async move {
            let _room = room.acquire().await;
            (pool, backend.name, sluice_fleet::scrape(&backend.address, limit).await)
        });
    }
    while let Some(page) = pages.join_next().await {
        let Ok((pool, backend, page)) = page else { continue };
        let sample = page.as_ref().and_then(EngineSample::of);
        let now = service.state.started.elapsed();
        service.state.tuner.lock().note_engine(&pool, &backend, sample, now);
    }
}
