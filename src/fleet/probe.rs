//! The prober: reports the health of every backend to admission.
//!
//! Every `health.probe_interval`, for all backends at once:
//! - `GET /health`: status 200 is a success, any other response a failure. vLLM's API server responds without asking its
//!   engine, so a success only means that the API server runs;
//! - after the first success, after each recovery and every [`MODELS_INTERVAL`]: `GET /v1/models`, for the names it serves
//!   (LoRA adapters are loaded and unloaded at run time) and its context limit; at each probe while something waits for a model;
//! - after the first success and after each recovery, and with models that include LoRA adapters: `GET /metrics`, for the size
//!   of its prefix cache and the number of its adapter slots.
//!
//! **Progress**: a backend with requests in flight that has sent no token for `health.stall` is suspected; pings are no tokens. Its `/metrics` are
//! read, and again at each later probe. If no counter of the engine's work changes for a third of `health.stall`, or there is
//! no response, the backend is hung: it is ejected and its streams are closed, so that they are retried or end with an error.
//! A long response that is not streamed sends no bytes either, but the counters change; a long prefill changes no counter,
//! but uses KV blocks. An engine without vLLM's counters (`--disable-log-stats`) never counts as hung, since a long response
//! cannot be distinguished from a hang; the time limits of requests still apply.
//!
//! A result belongs to the backend that was probed. It is dropped if a reload has given the id to another backend meanwhile.
//!
//! Bounds: bodies by [`HEALTH_BYTES`] and [`METRICS_BYTES`]; one probe per backend at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::http::fetch;
use sluice_core::base::BackendId;
use sluice_core::vllm::metrics;
use sluice_gateway::config::Health;
use sluice_gateway::pool::{AdapterId, Address, Admission, Cordon, Phase, RefusedGateway};

/// How often a backend's models are read while it stays up.
const MODELS_INTERVAL: Duration = Duration::from_secs(15);
/// The most that is read of `/health` and `/v1/models`.
const HEALTH_BYTES: usize = 1 << 20;
/// The most that is read of `/metrics`.
const METRICS_BYTES: usize = 8 << 20;
/// Model cards remembered per backend.
const CARDS_MAX: usize = 1_024;

/// One entry of a backend's `/v1/models`, as it was sent.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// The name.
    pub id: String,
    /// Whether it is a LoRA adapter of another model.
    pub is_adapter: bool,
    /// The whole card, JSON.
    pub json: Box<RawValue>,
}

/// The models that backends report.
#[derive(Debug, Default)]
pub struct ReportedModels(Mutex<HashMap<BackendId, Vec<ModelCard>>>);

impl ReportedModels {
    /// Every card, one per name, in the order of backends.
    pub fn cards(&self) -> Vec<ModelCard> {
        let by_backend = self.0.lock();
        let mut backends: Vec<_> = by_backend.keys().copied().collect();
        backends.sort();
        let mut cards: Vec<ModelCard> = Vec::new();
        for card in backends.iter().flat_map(|id| &by_backend[id]) {
            if !cards.iter().any(|known| known.id == card.id) {
                cards.push(card.clone());
            }
        }
        cards
    }

    /// Whether a backend serves a model; `None`: it has not reported what it serves.
    pub fn serves(&self, backend: BackendId, model: &str) -> Option<bool> {
        Some(self.0.lock().get(&backend)?.iter().any(|card| card.id == model))
    }

    /// The names that one backend serves.
    pub fn of(&self, backend: BackendId) -> Vec<String> {
        let by_backend = self.0.lock();
        by_backend.get(&backend).into_iter().flatten().map(|card| card.id.clone()).collect()
    }

    /// The names of LoRA adapters.
    pub fn adapters(&self) -> Vec<String> {
        self.cards().into_iter().filter(|card| card.is_adapter).map(|card| card.id).collect()
    }

    /// Every name.
    pub fn names(&self) -> Vec<String> {
        self.cards().into_iter().map(|card| card.id).collect()
    }

    /// Replaces what a backend serves; returns whether the names changed.
    fn set(&self, backend: BackendId, cards: Vec<ModelCard>) -> bool {
        let mut by_backend = self.0.lock();
        let same = by_backend
            .get(&backend)
            .is_some_and(|old| old.len() == cards.len() && old.iter().zip(&cards).all(|(a, b)| a.id == b.id));
        by_backend.insert(backend, cards);
        !same
    }

    /// Removes all backends but these; returns whether any was removed.
    fn retain(&self, known: &[BackendId]) -> bool {
        let mut by_backend = self.0.lock();
        let before = by_backend.len();
        by_backend.retain(|id, _| known.contains(id));
        by_backend.len() < before
    }
}

/// What is known about a backend between two rounds.
#[derive(Debug, Default)]
struct ProbeState {
    models_at: Option<Instant>,
    /// The last probe failed.
    failed: bool,
    /// Since when a suspect shows the same counters; `None` instead of counters: it did not respond.
    suspected: Option<(Instant, Option<WorkCounters>)>,
}

/// What changes while an engine works.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkCounters {
    /// The sum of the counters of its work.
    progress: f64,
    /// The share of KV blocks in use.
    kv_usage: f64,
}

/// What the `/metrics` of a suspect show.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Activity {
    Counters(WorkCounters),
    /// A page without vLLM's counters.
    NoCounters,
    NoResponse,
}

impl ProbeState {
    /// Records what a suspect shows; returns whether nothing has changed for at least `limit`.
    fn has_stalled(&mut self, activity: Activity, limit: Duration, now: Instant) -> bool {
        let shown = match activity {
            Activity::Counters(counters) => Some(counters),
            Activity::NoResponse => None,
            Activity::NoCounters => {
                self.suspected = None;
                return false;
            }
        };
        match self.suspected {
            Some((since, before)) if shown.is_none() || shown == before => {
                now.saturating_duration_since(since) >= limit
            }
            _ => {
                self.suspected = Some((now, shown));
                false
            }
        }
    }
}

/// The share of `health.stall` without any change: a step of the engine may take longer than a probe interval.
const STALL_SHARE: u32 = 3;

/// The result of one probe.
struct ProbeResult {
    id: BackendId,
    name: Arc<str>,
    address: Arc<Address>,
    up: Result<(), String>,
    /// What it serves, or the status of its answer if that is an error.
    models: Option<Result<ServedModels, u16>>,
    /// Tokens that its prefix cache holds.
    cache_tokens: Option<u64>,
    /// LoRA adapters that one step may use.
    adapter_slots: Option<u64>,
    activity: Option<Activity>,
}

#[derive(Debug)]
struct ServedModels {
    cards: Vec<ModelCard>,
    max_model_len: Option<u64>,
}

/// Probes all backends of an admission.
#[derive(Debug)]
pub struct Prober {
    admission: Arc<Admission>,
    reported: Arc<ReportedModels>,
    states: HashMap<BackendId, ProbeState>,
    /// Read the models of every backend in each round: something waits for one.
    pub await_models: bool,
    /// Clients send keys for the engines: a backend without an `api_key` that refuses a probe may serve them.
    pub forwards_keys: bool,
    /// The set of model names has changed and no caller was informed yet; kept when a round is cancelled.
    changed: bool,
}

impl Prober {
    /// A prober that writes into `admission` and `reported`.
    pub fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>) -> Self {
        Self { admission, reported, states: HashMap::new(), await_models: false, forwards_keys: false, changed: false }
    }

    /// Whether its engine is starting or being stopped.
    fn is_restarting(&self, backend: BackendId) -> bool {
        let mut backends = self.admission.view().into_iter().flat_map(|pool| pool.backends);
        backends.any(|view| view.id == backend && (view.cordon != Cordon::Open || view.closed))
    }

    /// Probes all backends once. Returns whether the set of model names changed since the last completed round.
    pub async fn probe_all(&mut self, rules: &Health) -> bool {
        let now = Instant::now();
        let silent = self.admission.silent_backends(rules.stall, now);
        let mut probes = JoinSet::new();
        let mut known = Vec::new();
        for backend in self.admission.view().into_iter().flat_map(|pool| pool.backends) {
            known.push(backend.id);
            let state = self.states.entry(backend.id).or_default();
            let models_due = self.await_models
                || backend.phase == Phase::Starting
                || state.models_at.is_none_or(|at| now.saturating_duration_since(at) >= MODELS_INTERVAL);
            let due = Due { models: models_due, cache: models_due && state.models_at.is_none() };
            let suspect = silent.contains(&backend.id);
            if !suspect {
                state.suspected = None;
            }
            let about = (backend.id, Arc::clone(&backend.name));
            probes.spawn(probe(about, Arc::clone(&backend.address), rules.probe_timeout, due, suspect));
        }
        self.states.retain(|id, _| known.contains(id));
        self.changed |= self.reported.retain(&known);
        while let Some(result) = probes.join_next().await {
            if let Ok(result) = result {
                self.changed |= self.apply(result, rules.stall / STALL_SHARE);
            }
        }
        std::mem::take(&mut self.changed)
    }

    fn apply(&mut self, result: ProbeResult, limit: Duration) -> bool {
        let now = Instant::now();
        if !self.admission.is_same_backend(result.id, &result.name, &result.address) {
            return false;
        }
        let is_restarting = result.up.is_err() && self.is_restarting(result.id);
        let moved = self.admission.record_probe(result.id, result.up.is_ok(), now);
        if let Some((before, after)) = moved {
            let why = result.up.as_ref().err().map_or("its probe succeeded", String::as_str);
            let (from, to) = (before.label(), after.label());
            match after == Phase::Down && !is_restarting {
                true => tracing::warn!(backend = %result.name, from, to, why, "backend changed"),
                false => tracing::info!(backend = %result.name, from, to, why, "backend changed"),
            }
        }
        let Some(state) = self.states.get_mut(&result.id) else { return false };
        if let Err(why) = &result.up {
            state.models_at = None;
            // Logged once per series of failures; a change of state is logged above.
            if !std::mem::replace(&mut state.failed, true) && moved.is_none() && !is_restarting {
                tracing::warn!(backend = %result.name, why, "probe failed");
            }
        } else {
            state.failed = false;
        }
        if let Some(activity) = result.activity
            && state.has_stalled(activity, limit, now)
        {
            tracing::warn!(backend = %result.name, "ejected: requests are in flight, but the engine sends no bytes and makes no progress");
            self.admission.mark_hung(result.id, now);
            state.suspected = None;
        }
        if let Some(tokens) = result.cache_tokens {
            self.admission.set_cache_size(result.id, tokens);
        }
        let has_key = result.address.api_key.is_some();
        let models = match result.models {
            Some(Ok(models)) => models,
            Some(Err(status @ (401 | 403))) if has_key || !self.forwards_keys => {
                let refused = RefusedGateway { status, by_probe: true };
                if self.admission.refused_gateway(result.id, refused, now) {
                    tracing::warn!(backend = %result.name, "{}", refused.text(has_key));
                }
                return false;
            }
            _ => return false,
        };
        self.admission.accepted_probe(result.id);
        state.models_at = Some(now);
        self.admission.set_max_model_len(result.id, models.max_model_len);
        let served = models.cards.iter().map(|card| AdapterId::of(&card.id)).collect();
        self.admission.set_adapters(result.id, served, result.adapter_slots.map(|slots| slots as usize));
        self.reported.set(result.id, models.cards)
    }
}

/// What else a probe reads.
#[derive(Clone, Copy, Debug)]
struct Due {
    models: bool,
    cache: bool,
}

async fn probe(
    (id, name): (BackendId, Arc<str>),
    address: Arc<Address>,
    limit: Duration,
    due: Due,
    suspect: bool,
) -> ProbeResult {
    let up = match fetch(&address, "/health", limit, HEALTH_BYTES).await {
        Ok((status, _)) if status.is_success() => Ok(()),
        Ok((status, _)) => Err(format!("/health responds with status {status}")),
        Err(error) => Err(error.to_string()),
    };
    let models = match due.models && up.is_ok() {
        true => read_models(&address, limit).await,
        false => None,
    };
    let has_adapters = matches!(&models, Some(Ok(models)) if models.cards.iter().any(|card| card.is_adapter));
    let page = if (due.cache && up.is_ok()) || has_adapters { scrape(&address, limit).await } else { None };
    let cache_tokens = page.as_ref().filter(|_| due.cache).and_then(|page| page.cache_tokens);
    let adapter_slots = page.and_then(|page| page.adapters).map(|adapters| adapters.slots);
    let activity = match suspect {
        true => Some(read_activity(&address, limit).await),
        false => None,
    };
    ProbeResult { id, name, address, up, models, cache_tokens, adapter_slots, activity }
}

async fn read_models(address: &Address, limit: Duration) -> Option<Result<ServedModels, u16>> {
    #[derive(Deserialize)]
    struct ModelList {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Fields {
        id: String,
        max_model_len: Option<u64>,
        parent: Option<String>,
    }
    let (status, body) = fetch(address, "/v1/models", limit, HEALTH_BYTES).await.ok()?;
    if !status.is_success() {
        return Some(Err(status.as_u16()));
    }
    let list: ModelList = serde_json::from_slice(&body).ok()?;
    let mut models = ServedModels { cards: Vec::new(), max_model_len: None };
    for json in list.data.into_iter().take(CARDS_MAX) {
        if let Ok(fields) = serde_json::from_str::<Fields>(json.get()) {
            models.max_model_len = models.max_model_len.max(fields.max_model_len);
            models.cards.push(ModelCard { id: fields.id, is_adapter: fields.parent.is_some(), json });
        }
    }
    Some(Ok(models))
}

async fn read_activity(address: &Address, limit: Duration) -> Activity {
    match read_metrics(address, limit).await {
        Err(()) => Activity::NoResponse,
        Ok(None) => Activity::NoCounters,
        Ok(Some(page)) => Activity::Counters(WorkCounters { progress: page.progress(), kv_usage: page.kv_usage }),
    }
}

/// vLLM's metrics, read from an engine within `limit`; `None` where there are none.
pub async fn scrape(address: &Address, limit: Duration) -> Option<metrics::MetricsSnapshot> {
    read_metrics(address, limit).await.ok().flatten()
}

/// vLLM's metrics. `None`: the response is something else; an error: there is none.
async fn read_metrics(address: &Address, limit: Duration) -> Result<Option<metrics::MetricsSnapshot>, ()> {
    let (status, body) = fetch(address, "/metrics", limit, METRICS_BYTES).await.map_err(drop)?;
    let page = metrics::MetricsSnapshot::parse(std::str::from_utf8(&body).unwrap_or_default());
    Ok(Some(page).filter(|page| status.is_success() && page.samples > 0))
}

#[cfg(test)]
mod tests;
