//! Looks for the causes of slow requests every ten seconds, whether this gateway leads or not.
//!
//! A look reads metrics pages of at most [`PAGES`] engines, silent ones first and the others in
//! turn. For an engine that is not read, the last page counts. Each finding is logged when it
//! appears and when it goes. With `tokens = "auto"`, the same pages set the learned limit of tokens
//! of each backend. Bounds: the numbers of one page for each backend in rotation.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::Core;
use sluice_admin::status::Diagnosis;
use sluice_config::TokenLimit;
use sluice_core::base::BackendId;
use sluice_gateway::pool::{BackendView, Bound, PoolView};
use sluice_gateway::telemetry::EnginePage;
use sluice_online::findings::facts::{Facts, PageFacts};
use sluice_online::findings::{Finding, Findings, LOOK};
use sluice_online::kv_limit::{KvLimit, KvSample};

const PAGES: usize = 32;
/// Largest age of a page that is shown. Reading the pages of 200 engines takes 70 s.
const SHOWN_FOR: Duration = Duration::from_mins(2);

#[derive(Debug)]
pub(crate) struct FindingsService {
    core: Arc<Core>,
    findings: parking_lot::Mutex<Findings>,
    pages: parking_lot::Mutex<HashMap<BackendId, (Instant, PageFacts)>>,
    limits: parking_lot::Mutex<HashMap<BackendId, KvLimit>>,
}

impl FindingsService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            findings: parking_lot::Mutex::default(),
            pages: parking_lot::Mutex::default(),
            limits: parking_lot::Mutex::default(),
        }
    }

    pub(crate) async fn run(self: Arc<Self>, mut end: watch::Receiver<bool>) {
        let mut turn = 0;
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                _ = end.wait_for(|ending| *ending) => return,
            }
            tokio::select! {
                read = self.read_pages(turn) => self.limit_tokens(&read),
                _ = end.wait_for(|ending| *ending) => return,
            }
            turn += PAGES;
            let app = Arc::clone(&self);
            // A look takes the lock of admission, so it runs on a thread that may block.
            if let Err(error) = tokio::task::spawn_blocking(move || app.look_for_causes()).await {
                tracing::error!(%error, "the look for causes of slow requests failed");
            }
        }
    }

    /// Returns the engines whose pages were read.
    async fn read_pages(&self, turn: usize) -> Vec<BackendId> {
        let limit = self.core.config.load().health.probe_timeout;
        let view = self.core.admission.view();
        let serving: Vec<&BackendView> = backends(&view).filter(|backend| backend.in_rotation()).collect();
        self.pages.lock().retain(|id, _| serving.iter().any(|backend| backend.id == *id));
        let mut reads = JoinSet::new();
        let is_silent = |backend: &&BackendView| backend.silent_since.is_some_and(|since| since.elapsed() >= LOOK / 2);
        let (silent, others): (Vec<_>, Vec<_>) = serving.into_iter().partition(is_silent);
        let in_turn = others.iter().cycle().skip(turn % others.len().max(1)).take(others.len());
        for backend in silent.iter().chain(in_turn).take(PAGES) {
            let (id, address) = (backend.id, Arc::clone(&backend.address));
            reads.spawn(async move { (id, sluice_fleet::scrape(&address, limit).await) });
        }
        let mut done = Vec::new();
        while let Some(read) = reads.join_next().await {
            if let Ok((id, Some(page))) = read
                && page.lacks().next().is_none()
            {
                // The page shows the size of a tier in host memory from the engine's first step on,
                // so the probe may not have seen it.
                if page.offloaded_tokens > 0
                    && let Some(tokens) = page.prefix_tokens()
                {
                    self.core.admission.set_cache_size(id, tokens);
                }
                self.pages.lock().insert(id, (Instant::now(), PageFacts::from(&page)));
                done.push(id);
            }
        }
        done
    }

    /// Learns the limits of tokens of the engines in `read`, whose pages are new.
    fn limit_tokens(&self, read: &[BackendId]) {
        let (config, view, now) = (self.core.config.load(), self.core.admission.view(), self.core.started.elapsed());
        let (pages, mut limits) = (self.pages.lock(), self.limits.lock());
        limits.retain(|id, _| backends(&view).any(|backend| backend.id == *id));
        for pool in &view {
            let is_auto = config.pools.iter().any(|own| own.name == *pool.name && own.tokens == TokenLimit::Auto);
            for backend in &pool.backends {
                if !is_auto {
                    limits.remove(&backend.id);
                } else if let Some((_, page)) = pages.get(&backend.id).filter(|_| read.contains(&backend.id)) {
                    let own = limits.entry(backend.id).or_default();
                    let changed = own.look(KvSample::new(page, backend.used.tokens, pool.queue_length > 0, now));
                    log_limit(pool, backend, own, changed);
                } else if let Some(own) = limits.get_mut(&backend.id) {
                    let changed = own.expire(now);
                    log_limit(pool, backend, own, changed);
                }
                let learned = limits.get(&backend.id).and_then(KvLimit::limit);
                if learned != backend.learned {
                    self.core.admission.set_bounds([(backend.id, Bound::Learned(learned))]);
                }
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

    pub(crate) fn all(&self) -> Vec<Finding> {
        self.findings.lock().all(self.core.started.elapsed())
    }

    pub(crate) fn diagnosis(&self) -> Diagnosis {
        let (keys, engines) = self.findings.lock().last_minute();
        Diagnosis { findings: self.all(), keys, engines, ..Diagnosis::default() }
    }

    pub(crate) fn engine_pages(&self) -> Vec<EnginePage> {
        let (view, pages) = (self.core.admission.view(), self.pages.lock());
        let page = |pool: &PoolView, backend: &BackendView| {
            let (_, facts) = pages.get(&backend.id).filter(|(read, _)| read.elapsed() < SHOWN_FOR)?;
            Some(EnginePage {
                pool: pool.name.to_string(),
                backend: backend.name.to_string(),
                running: facts.running,
                waiting: facts.waiting,
                kv_usage: facts.kv_usage,
                preemptions: facts.preemptions,
                prefix: facts.prefix,
            })
        };
        view.iter().flat_map(|pool| pool.backends.iter().filter_map(|own| page(pool, own))).collect()
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
        let mut facts = Facts::of(&view, totals, |backend| {
            let silent = backend.silent_since.map(|since| Instant::now().saturating_duration_since(since));
            let page = self.pages.lock().get(&backend.id).map(|(_, facts)| *facts);
            (silent, page, self.core.admission.decoding(backend.id, Instant::now()))
        });
        let in_flight = self.core.learned.key_usage.in_flight().into_iter();
        facts.in_flight = in_flight.map(|key| (key.name, key.requests.0 as f64, key.tokens.0 as f64)).collect();
        for (pool, own) in view.iter().zip(&mut facts.pools) {
            let keys = work.iter().filter(|key| *key.pool == *pool.name);
            own.keys = keys.map(|key| (key.key.as_str().into(), key.seconds, key.waiting as f64)).collect();
            let members = pool.backends.iter().filter(|backend| !backend.removed);
            own.differences = self.core.reported.differences(members.map(|backend| (&*backend.name, backend.id)));
            for backend in &mut own.backends {
                let shown = pool.backends.iter().find(|shown| shown.name == backend.name);
                let engine = shown.map_or(Cow::Borrowed(&*backend.name), BackendView::engine_name);
                backend.flags = settings.get(&format!("{}/{engine}", pool.name)).cloned().unwrap_or_default();
            }
        }
        facts
    }
}

fn log_limit(pool: &PoolView, backend: &BackendView, limit: &KvLimit, changed: bool) {
    let (pool, backend) = (&pool.name, &backend.name);
    match limit.limit() {
        _ if !changed => {}
        Some(limit) => tracing::warn!(
            %pool, %backend, tokens = limit.tokens, preempted = limit.preempted, outstanding = limit.outstanding,
            "tokens = \"auto\": the engine preempts requests, because its KV cache is full; fewer outstanding tokens are admitted"
        ),
        None => tracing::info!(%pool, %backend, "tokens = \"auto\": the limit of outstanding tokens is gone"),
    }
}

fn backends(view: &[PoolView]) -> impl Iterator<Item = &BackendView> {
    view.iter().flat_map(|pool| &pool.backends)
}
