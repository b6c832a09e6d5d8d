//! Looks for the causes of slow requests every ten seconds, whether this gateway leads or not.
//!
//! A look reads the metrics pages of at most [`PAGES`] engines, in turn; for the others the last
//! page counts. Findings that appear and go are logged once. Bound: one page's numbers for each
//! backend in rotation.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::Core;
use sluice_admin::status::Diagnosis;
use sluice_core::base::BackendId;
use sluice_core::vllm::metrics::MetricsSnapshot;
use sluice_gateway::pool::{BackendView, Cordon, PoolView};
use sluice_gateway::telemetry::totals::TotalsView;
use sluice_online::findings::facts::{BackendFacts, EngineFacts, Facts, PoolFacts};
use sluice_online::findings::{Finding, Findings, LOOK};

/// The most metrics pages that one look reads.
const PAGES: usize = 32;

/// The findings of a running gateway.
#[derive(Debug)]
pub(crate) struct FindingsService {
    core: Arc<Core>,
    findings: parking_lot::Mutex<Findings>,
    pages: parking_lot::Mutex<HashMap<BackendId, EngineFacts>>,
}

impl FindingsService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core, findings: parking_lot::Mutex::default(), pages: parking_lot::Mutex::default() }
    }

    pub(crate) async fn run(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let mut turn = 0;
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            tokio::select! {
                () = self.read_pages(turn) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            turn += PAGES;
            let app = Arc::clone(&self);
            // A look takes the lock of admission.
            if let Err(error) = tokio::task::spawn_blocking(move || app.look_for_causes()).await {
                tracing::error!(%error, "the look for causes of slow requests failed");
            }
        }
    }

    /// Reads the pages of the backends from position `turn` on.
    async fn read_pages(&self, turn: usize) {
        let limit = self.core.config.load().health.probe_timeout;
        let view = self.core.admission.view();
        let serving: Vec<&BackendView> = backends(&view).filter(|backend| backend.in_rotation()).collect();
        self.pages.lock().retain(|id, _| serving.iter().any(|backend| backend.id == *id));
        let mut reads = JoinSet::new();
        for backend in serving.iter().cycle().skip(turn % serving.len().max(1)).take(PAGES.min(serving.len())) {
            let (id, address) = (backend.id, Arc::clone(&backend.address));
            reads.spawn(async move { (id, sluice_fleet::scrape(&address, limit).await) });
        }
        while let Some(read) = reads.join_next().await {
            if let Ok((id, Some(page))) = read
                && page.lacks().next().is_none()
            {
                self.pages.lock().insert(id, facts_of(&page));
            }
        }
    }

    fn look_for_causes(&self) {
        let (facts, now) = (self.facts(), self.core.started.elapsed());
        let change = self.findings.lock().look(facts, now);
        for finding in change.appeared {
            let Finding { cause, pool, subject, sentence, evidence, advice, .. } = finding;
            tracing::warn!(cause = cause.label(), pool, subject, evidence, advice, "finding: {sentence}");
        }
        for finding in change.gone {
            let Finding { cause, pool, subject, .. } = finding;
            tracing::info!(cause = cause.label(), pool, subject, "a finding is gone");
        }
    }

    /// The findings now, the most severe first.
    pub(crate) fn all(&self) -> Vec<Finding> {
        self.findings.lock().all(self.core.started.elapsed())
    }

    /// The findings, and the last minute of keys and of engines.
    pub(crate) fn diagnosis(&self) -> Diagnosis {
        let (keys, engines) = self.findings.lock().last_minute();
        Diagnosis { findings: self.all(), keys, engines, ..Diagnosis::default() }
    }

    fn facts(&self) -> Facts {
        let (view, totals) = (self.core.admission.view(), self.core.telemetry.totals());
        let settings: HashMap<String, Vec<String>> = self
            .core
            .fleet
            .views()
            .into_iter()
            .map(|engine| (engine.backend, engine.settings.split_whitespace().map(ToOwned::to_owned).collect()))
            .collect();
        let work = self.core.flow.routing_table().keys.work(&view);
        let pools = view.iter().map(|pool| PoolFacts {
            name: Arc::clone(&pool.name),
            queue: pool.queue_length as f64,
            totals: of(&totals.pools, &pool.name),
            backends: pool.backends.iter().map(|backend| self.backend(pool, backend, &totals, &settings)).collect(),
            keys: work
                .iter()
                .filter(|key| *key.pool == *pool.name)
                .map(|key| (key.key.as_str().into(), key.seconds, key.waiting as f64))
                .collect(),
            differences: {
                let members = pool.backends.iter().filter(|backend| !backend.removed);
                self.core.reported.differences(members.map(|backend| (&*backend.name, backend.id)))
            },
        });
        Facts { pools: pools.collect(), keys: totals.keys.clone() }
    }

    fn backend(
        &self,
        pool: &PoolView,
        backend: &BackendView,
        totals: &TotalsView,
        settings: &HashMap<String, Vec<String>>,
    ) -> BackendFacts {
        let own = totals.backends.iter().find(|([of, name], _)| *of == pool.name && *name == backend.name);
        let flags = settings.get(&format!("{}/{}", pool.name, backend.name)).cloned().unwrap_or_default();
        BackendFacts {
            name: Arc::clone(&backend.name),
            serves: backend.in_rotation(),
            is_put_aside: backend.draining || backend.removed || backend.closed || backend.cordon != Cordon::Open,
            state: backend.state(),
            in_flight: f64::from(backend.used.requests),
            slots: f64::from(backend.limits.slots),
            silent: backend.silent_since.map(|since| Instant::now().saturating_duration_since(since)),
            totals: own.map(|(_, totals)| *totals).unwrap_or_default(),
            engine: self.pages.lock().get(&backend.id).copied(),
            flags,
        }
    }
}

fn backends(view: &[PoolView]) -> impl Iterator<Item = &BackendView> {
    view.iter().flat_map(|pool| &pool.backends)
}

fn of<T: Copy + Default>(all: &[(Arc<str>, T)], name: &str) -> T {
    all.iter().find(|(own, _)| **own == *name).map(|(_, value)| *value).unwrap_or_default()
}

fn facts_of(page: &MetricsSnapshot) -> EngineFacts {
    EngineFacts {
        running: page.running,
        waiting: page.waiting,
        deferred: page.deferred.unwrap_or(0.0),
        kv_usage: page.kv_usage,
        preemptions: page.preemptions,
        ttft: (page.ttft.1, page.ttft.0),
        cache_tokens: page.cache_tokens,
        adapters: page.adapters.as_ref().map(|adapters| (adapters.names.len() as u64, adapters.slots)),
    }
}
