//! The prober reports the health of every backend to admission.
//!
//! Every `health.probe_interval`, for all backends in parallel:
//!
//! | request | reads | when |
//! |---|---|---|
//! | `/health` | a 2xx status: the API server runs | always; path and rule are the kind's |
//! | `/v1/models` | names, context limit | after a start or recovery; every [`MODELS_INTERVAL`] |
//! | | | while a caller waits for a model; after an unexpected refusal |
//! | `/openapi.json` | routes | after a refused route, at most every [`MODELS_INTERVAL`] |
//! | `/metrics` | prefix cache, adapter slots | after a start or recovery; with LoRA adapters |
//! | | data-parallel ranks (`probed_ranks.rs`) | and with the models of a backend with a rank |
//! | slots page | sequences that run at once | with the models, if the kind has such a page |
//! | pages of kinds | the kind (`engine_kind.rs`) | after a start or recovery; without `/health` |
//!
//! vLLM's API server answers `/health` without asking the engine core. A result is dropped if a
//! reload has meanwhile given the id of the probed backend to another one.
//!
//! **Progress**: a backend with requests in flight that sent no byte that shows work for
//! `health.stall` is a suspect, whose `/metrics` each probe reads. If no work counter changes for a
//! third of `health.stall`, or there is no response for that time, the backend is *hung*. It is
//! ejected, and the streams are closed. A long response that is not streamed changes counters, and
//! a long prefill uses KV blocks. An engine without counters (`--disable-log-stats`) never counts
//! as hung; the time limits of requests still apply.
//!
//! In a pool with a `deadline`, a backend with requests that showed no work for this time is hung,
//! whatever its counters say.
//!
//! An engine that works on one request at a time and answers nothing meanwhile is not probed while
//! it has requests.
//!
//! `core/engines` has the pages of each kind of engine; `metrics_page.rs` reads metrics. Bounds:
//! [`SLOTS_BYTES`]; one probe per backend at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::engine_health::{Unhealthy, read_health};
use super::engine_kind::{FoundKinds, identify};
use super::http::fetch;
use super::metrics_page::{read_metrics, read_page, snapshot};
use super::models::{ModelList, ReportedModels, Unreadable, read_models, read_routes};
use super::probed_ranks::ProbedRanks;
use sluice_config::{Address, Health};
use sluice_core::base::BackendId;
use sluice_core::engines::{EngineKind, SlotsPage};
use sluice_core::vllm::metrics;
use sluice_core::vllm::rank_page::ranks;
use sluice_gateway::pool::{Admission, Bound, Cordon, Phase, PoolView, RefusedGateway, RouteSet, Served};

/// How often the models of a backend that is up are read. Also the least time between two readings
/// of its routes, and between two attempts to find out the kind of a server without a health page.
const MODELS_INTERVAL: Duration = Duration::from_secs(15);
const SLOTS_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
struct ProbeState {
    models_at: Option<Instant>,
    failed: bool,
    /// The kind by whose pages the backend was asked.
    engine: EngineKind,
    /// When the backend was last asked for its kind.
    kind_at: Option<Instant>,
    /// Whether the backend has shown its kind since it came up.
    is_kind_known: bool,
    /// When the routes were read since the backend came up.
    routes_at: Option<Instant>,
    /// Since when a suspect shows these counters, or does not respond (`None`).
    suspected: Option<(Instant, Option<WorkCounters>)>,
    ranks: ProbedRanks,
}

/// Values that change while an engine works.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkCounters {
    progress: f64,
    kv_usage: f64,
}

/// The `/metrics` of a suspect.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Activity {
    Counters(WorkCounters),
    /// A page without counters.
    NoCounters,
    NoResponse,
}

impl ProbeState {
    /// Records the activity of a suspect; returns whether nothing has changed for at least `limit`.
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

/// A third of `health.stall`. It is not a probe interval, because one step of the engine may take
/// longer.
const STALL_SHARE: u32 = 3;

struct ProbeResult {
    id: BackendId,
    name: Arc<str>,
    address: Arc<Address>,
    begun: Instant,
    up: Result<(), Unhealthy>,
    models: Option<Result<ModelList, Unreadable>>,
    /// `Some(None)`: the engine does not describe routes.
    routes: Option<Option<RouteSet>>,
    /// The kind of the engine; `Some(None)`: no answer is certain.
    kind: Option<Option<EngineKind>>,
    cache_tokens: Option<u64>,
    /// Different LoRA adapters that one step can use.
    adapter_slots: Option<u64>,
    /// Sequences that the engine runs at once.
    slots: Option<u32>,
    /// The data-parallel ranks of the engine; none: unknown.
    ranks: Vec<u16>,
    activity: Option<Activity>,
}

/// Probes all backends of an admission.
#[derive(Debug)]
pub struct Prober {
    admission: Arc<Admission>,
    reported: Arc<ReportedModels>,
    states: HashMap<BackendId, ProbeState>,
    /// Whether each round reads the models of every backend, because a caller waits for a model.
    pub await_models: bool,
    /// Whether clients send keys for the engines. Then a backend without an `api_key` that refuses
    /// a probe may still serve clients.
    pub forwards_keys: bool,
    /// The kinds of engine that answers showed.
    pub kinds: Arc<FoundKinds>,
    /// Whether one of these kinds changed. The reader clears it.
    pub kinds_changed: bool,
    /// For pools with a deadline, the longest silence of a backend with requests.
    pub deadlines: HashMap<Arc<str>, Duration>,
    /// The set of model names has changed since the last completed round; kept when a round is
    /// cancelled.
    changed: bool,
    /// The differences between the backends of each pool that were last logged.
    differences: HashMap<Arc<str>, String>,
}

impl Prober {
    /// A prober that writes into `admission` and `reported`.
    pub fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>) -> Self {
        Self {
            admission,
            reported,
            states: HashMap::new(),
            await_models: false,
            forwards_keys: false,
            kinds: Arc::default(),
            kinds_changed: false,
            deadlines: HashMap::new(),
            changed: false,
            differences: HashMap::new(),
        }
    }

    fn is_restarting(&self, backend: BackendId) -> bool {
        let mut backends = self.admission.view().into_iter().flat_map(|pool| pool.backends);
        backends.any(|view| view.id == backend && (view.cordon != Cordon::Open || view.closed))
    }

    /// Probes all backends once. Returns whether the set of model names changed since the last
    /// completed round.
    pub async fn probe_all(&mut self, rules: &Health) -> bool {
        let now = Instant::now();
        let silent = self.admission.silent_backends(rules.stall, now);
        let mut probes = JoinSet::new();
        let mut known = Vec::new();
        let pools = self.admission.view();
        self.end_overdue(&pools, now);
        for backend in pools.iter().flat_map(|pool| &pool.backends) {
            known.push(backend.id);
            let state = self.states.entry(backend.id).or_default();
            if std::mem::replace(&mut state.engine, backend.address.engine) != backend.address.engine {
                // The pages of another kind must be read anew.
                state.models_at = None;
            }
            if backend.used.slots > 0 && !backend.address.engine.rules().answers_while_busy {
                continue;
            }
            let is_old = |at: Option<Instant>| at.is_none_or(|at| now.saturating_duration_since(at) >= MODELS_INTERVAL);
            let models_due =
                self.await_models || backend.facts_due || backend.phase == Phase::Starting || is_old(state.models_at);
            let due = Due {
                models: models_due,
                cache: models_due && state.models_at.is_none(),
                routes: backend.routes_due && is_old(state.routes_at),
                kind: !state.is_kind_known,
                kind_if_unlike: !state.is_kind_known && is_old(state.kind_at),
            };
            let suspect = silent.contains(&backend.id);
            if !suspect {
                state.suspected = None;
            }
            let about = (backend.id, Arc::clone(&backend.name));
            probes.spawn(probe(about, Arc::clone(&backend.address), rules.probe_timeout, due, suspect));
        }
        self.states.retain(|id, _| known.contains(id));
        self.changed |= self.reported.retain(&known);
        self.kinds.retain(&known);
        while let Some(result) = probes.join_next().await {
            if let Ok(result) = result {
                self.changed |= self.apply(result, rules.stall / STALL_SHARE);
            }
        }
        self.log_differences();
        std::mem::take(&mut self.changed)
    }

    /// Ejects the backends that were silent for the deadline of their pool.
    fn end_overdue(&self, pools: &[PoolView], now: Instant) {
        for (pool, deadline) in pools.iter().filter_map(|pool| Some((pool, self.deadlines.get(&pool.name)?))) {
            let silent = self.admission.silent_backends(*deadline, now);
            for backend in pool.backends.iter().filter(|backend| silent.contains(&backend.id)) {
                tracing::warn!(backend = %backend.name, ?deadline, "ejected: it has requests and sent no byte within the deadline of the pool");
                self.admission.mark_hung(backend.id, now);
            }
        }
    }

    fn log_differences(&mut self) {
        let pools = self.admission.view();
        self.differences.retain(|name, _| pools.iter().any(|pool| pool.name == *name));
        for pool in &pools {
            let members = pool.backends.iter().filter(|backend| !backend.removed);
            let differences = self.reported.differences(members.map(|backend| (&*backend.name, backend.id)));
            if self.differences.get(&pool.name) == differences.as_ref() {
                continue;
            }
            match differences {
                Some(text) => {
                    tracing::warn!(pool = %pool.name, "its engines serve different requests, each gets those that it serves: {text}");
                    self.differences.insert(Arc::clone(&pool.name), text);
                }
                None => {
                    tracing::info!(pool = %pool.name, "its engines serve the same models again");
                    self.differences.remove(&pool.name);
                }
            }
        }
    }

    /// Notes the ranks of the engine. If it lacks the rank of the backend, the backend is down.
    fn note_ranks(&mut self, result: &mut ProbeResult) {
        let Some(state) = self.states.get_mut(&result.id) else { return };
        if !result.ranks.is_empty() {
            let configured = match result.address.rank {
                Some(_) => self.admission.ranks_at(&result.address),
                None => Vec::new(),
            };
            state.ranks.note(&result.name, &result.address, &result.ranks, &configured);
        }
        if let (Ok(()), Some(why)) = (&result.up, state.ranks.missing()) {
            result.up = Err(Unhealthy::Down(why.clone()));
        }
    }

    fn apply(&mut self, mut result: ProbeResult, limit: Duration) -> bool {
        let now = Instant::now();
        if !self.admission.is_same_backend(result.id, &result.name, &result.address) {
            return false;
        }
        self.note_ranks(&mut result);
        // Models count before health: an engine that comes up may serve other models than before.
        let is_read = matches!(result.models, Some(Ok(_)));
        let refused = match &result.models {
            Some(Err(Unreadable::Status(status @ (401 | 403)))) => Some(*status),
            _ => None,
        };
        let engine = result.address.engine;
        self.note_kind(&result);
        let names_changed =
            result.models.is_some_and(|list| self.note_models((result.id, &result.name), list, result.begun));
        let is_restarting = result.up.is_err() && self.is_restarting(result.id);
        let is_loading = result.up == Err(Unhealthy::Loading);
        let moved = self.admission.record_probe(result.id, result.up.is_ok(), now);
        if let Some((before, after)) = moved {
            let why = result.up.as_ref().err().map_or_else(|| "its probe succeeded".to_owned(), Unhealthy::to_string);
            let (from, to) = (before.label(), after.label());
            match after == Phase::Down && !is_restarting && !is_loading {
                true => tracing::warn!(backend = %result.name, from, to, why, "backend changed"),
                false => tracing::info!(backend = %result.name, from, to, why, "backend changed"),
            }
        }
        let Some(state) = self.states.get_mut(&result.id) else { return names_changed };
        if let Err(why) = &result.up {
            (state.models_at, state.routes_at) = (None, None);
            // Once per series of failures; a change of state is logged above.
            if !std::mem::replace(&mut state.failed, true) && moved.is_none() && !is_restarting {
                match is_loading {
                    true => tracing::info!(backend = %result.name, "{why}"),
                    false => tracing::warn!(backend = %result.name, %why, "probe failed"),
                }
            }
        } else {
            state.failed = false;
        }
        if !engine.rules().lists_models && result.up.is_ok() && state.models_at.is_none() {
            state.models_at = Some(now);
            self.admission.set_served(result.id, Served::unreadable(), None, result.begun);
        }
        // Routes count after health, because a recovery clears the known routes.
        if let Some(routes) = result.routes {
            self.admission.set_routes(result.id, routes, result.begun);
            state.routes_at = Some(result.begun);
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
        if let Some(status) = refused.filter(|_| has_key || !self.forwards_keys) {
            // The models are read at each probe until the engine accepts the gateway.
            state.models_at = None;
            let refused = RefusedGateway { status, by_probe: true };
            if self.admission.refused_gateway(result.id, refused, now) {
                tracing::warn!(backend = %result.name, "{}", refused.text(has_key));
            }
        }
        if is_read {
            self.admission.accepted_probe(result.id);
        }
        if let Some(slots) = result.slots {
            self.admission.set_bounds([(result.id, Bound::Ceiling(Some(slots)))]);
        }
        if let Some(slots) = result.adapter_slots {
            self.admission.set_adapter_slots(result.id, slots as usize);
        }
        names_changed
    }

    fn note_kind(&mut self, result: &ProbeResult) {
        let Some(state) = self.states.get_mut(&result.id) else { return };
        let is_up = result.up.is_ok();
        if let Some(kind) = result.kind {
            self.kinds_changed |= self.kinds.note(result.id, kind, is_up);
            state.kind_at = Some(result.begun);
        }
        state.is_kind_known = is_up && (state.is_kind_known || result.kind.is_some());
    }

    /// Records the models of a probe that began at `begun`; returns whether the names changed.
    fn note_models(
        &mut self,
        (id, name): (BackendId, &str),
        list: Result<ModelList, Unreadable>,
        begun: Instant,
    ) -> bool {
        if let Ok(list) = &list {
            self.admission.set_roots(id, list.roots());
        }
        let reading = self.reported.read(id, list);
        match reading.readable {
            Some(Err(why)) => {
                tracing::warn!(backend = name, "{why}: it gets requests for every model of its pool");
            }
            Some(Ok(())) => tracing::info!(backend = name, "its list of models can be read again"),
            None => {}
        }
        if let Some(served) = reading.served {
            if let Some(state) = self.states.get_mut(&id) {
                state.models_at = Some(Instant::now());
            }
            self.admission.set_served(id, served, reading.max_model_len, begun);
        }
        reading.names_changed
    }
}

/// Reads besides `/health`.
#[derive(Clone, Copy, Debug)]
struct Due {
    models: bool,
    cache: bool,
    routes: bool,
    /// The kind, of an engine that is up.
    kind: bool,
    /// The kind, of an engine without the health page of its kind.
    kind_if_unlike: bool,
}

async fn probe(
    (id, name): (BackendId, Arc<str>),
    address: Arc<Address>,
    limit: Duration,
    due: Due,
    suspect: bool,
) -> ProbeResult {
    let (begun, rules) = (Instant::now(), address.engine.rules());
    let up = read_health(&address, limit).await;
    let models = match due.models && up.is_ok() && rules.lists_models {
        true => Some(read_models(&address, limit).await),
        false => None,
    };
    let (slots, kv_tokens) = match &rules.slots_page {
        Some(page) if due.models && up.is_ok() => read_slots(&address, page, limit).await,
        _ => (None, None),
    };
    let routes = match due.routes && up.is_ok() && rules.describes_routes {
        true => Some(read_routes(&address, limit).await),
        false => None,
    };
    let list = models.as_ref().and_then(|list| list.as_ref().ok());
    let kind = match &up {
        Ok(()) if due.kind => identify(&address, list.map(|list| &list.cards[..]), limit).await.ok(),
        Err(Unhealthy::Unlike(_)) if due.kind_if_unlike => identify(&address, None, limit).await.ok(),
        _ => None,
    };
    let has_adapters = list.is_some_and(|models| models.cards.iter().any(|card| card.is_adapter));
    let reads_page = due.cache || (due.models && address.rank.is_some());
    let text = match (reads_page && up.is_ok()) || has_adapters {
        true => read_page(&address, limit).await.ok().flatten(),
        false => None,
    };
    let ranks = text.as_deref().filter(|_| address.engine == EngineKind::Vllm).map_or_else(Vec::new, ranks);
    let page = text.and_then(|text| snapshot(&address, &text));
    let shown = page.as_ref().filter(|_| due.cache);
    if let Some(doubt) = shown.and_then(|page| page.cache_doubt) {
        tracing::warn!(backend = %name, "the engine states a size of the KV cache that cannot be true: {doubt}; its blocks count");
    }
    let cache_tokens = shown.and_then(metrics::MetricsSnapshot::prefix_tokens).or(kv_tokens.filter(|_| due.cache));
    let adapter_slots = page.and_then(|page| page.adapters).map(|adapters| adapters.slots);
    let activity = match suspect {
        true => Some(read_activity(&address, limit).await),
        false => None,
    };
    ProbeResult {
        id,
        name,
        address,
        begun,
        up,
        models,
        routes,
        kind,
        cache_tokens,
        adapter_slots,
        slots,
        ranks,
        activity,
    }
}

/// Sequences that run at once, and tokens that the KV cache holds.
async fn read_slots(address: &Address, page: &SlotsPage, limit: Duration) -> (Option<u32>, Option<u64>) {
    match fetch(address, page.path, limit, SLOTS_BYTES).await {
        Ok((status, body)) if status.is_success() => ((page.read)(&body), (page.tokens)(&body)),
        _ => (None, None),
    }
}

async fn read_activity(address: &Address, limit: Duration) -> Activity {
    if !address.engine.rules().metrics.as_ref().is_some_and(|page| page.shows_steps) {
        return Activity::NoCounters;
    }
    match read_metrics(address, limit).await {
        Err(()) => Activity::NoResponse,
        Ok(None) => Activity::NoCounters,
        Ok(Some(page)) => Activity::Counters(WorkCounters { progress: page.progress(), kv_usage: page.kv_usage }),
    }
}

#[cfg(test)]
mod tests;
