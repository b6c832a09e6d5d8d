//! The prober: keeps admission's picture of every backend's health true.
//!
//! Every `health.probe_interval`, for each backend at once:
//! - `GET /health`: 200 is up, anything else a miss. vLLM answers it from its front process and does
//!   not ask the engine, so "up" means "somebody listens", no more;
//! - on the first success, after each return and every [`MODELS_EVERY`]: `GET /v1/models`, for the
//!   names it serves (LoRA adapters come and go) and its context limit.
//!
//! **Progress**: a backend that carries requests and has sent no byte for `health.stall` is suspected.
//! Its `/metrics` are read, and again at each later tick: if nothing that moves only when the engine
//! works has moved, or they cannot be read at all, it is hung: ejected, and its streams are cut so that
//! they can be tried elsewhere or end honestly. One long answer that is not streamed shows no bytes
//! either, but its engine's counters move.
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
use crate::base::BackendId;
use crate::config::Health;
use crate::pool::{Address, Admission, Phase};
use crate::vllm::metrics;

/// How often a backend's models are asked for while nothing changes.
const MODELS_EVERY: Duration = Duration::from_secs(15);
/// The most that is read of `/health` and `/v1/models`.
const HEALTH_BYTES: usize = 1 << 20;
/// The most that is read of `/metrics`.
const METRICS_BYTES: usize = 8 << 20;
/// Model cards remembered per backend.
const CARDS_MAX: usize = 1_024;

/// One entry of a backend's `/v1/models`, as it was sent.
#[derive(Clone, Debug)]
pub struct Card {
    /// The name.
    pub id: String,
    /// The whole card, JSON.
    pub json: Box<RawValue>,
}

/// What backends say they serve.
#[derive(Debug, Default)]
pub struct Reported(Mutex<HashMap<BackendId, Vec<Card>>>);

impl Reported {
    /// Every card, one per name, in the order of backends.
    pub fn cards(&self) -> Vec<Card> {
        let by_backend = self.0.lock();
        let mut backends: Vec<_> = by_backend.keys().copied().collect();
        backends.sort();
        let mut cards: Vec<Card> = Vec::new();
        for card in backends.iter().flat_map(|id| &by_backend[id]) {
            if !cards.iter().any(|known| known.id == card.id) {
                cards.push(card.clone());
            }
        }
        cards
    }

    /// Every name.
    pub fn names(&self) -> Vec<String> {
        self.cards().into_iter().map(|card| card.id).collect()
    }

    /// Replaces what a backend serves; whether the names changed.
    fn set(&self, backend: BackendId, cards: Vec<Card>) -> bool {
        let mut by_backend = self.0.lock();
        let same = by_backend
            .get(&backend)
            .is_some_and(|old| old.len() == cards.len() && old.iter().zip(&cards).all(|(a, b)| a.id == b.id));
        by_backend.insert(backend, cards);
        !same
    }

    fn keep(&self, known: &[BackendId]) {
        self.0.lock().retain(|id, _| known.contains(id));
    }
}

/// What is remembered about a backend between ticks.
#[derive(Debug, Default)]
struct Memory {
    models_at: Option<Instant>,
    /// The last probe was missed.
    missed: bool,
    /// The engine's progress when it was first suspected.
    suspected: Option<f64>,
}

/// What one round found out about one backend.
struct Finding {
    id: BackendId,
    name: Arc<str>,
    up: Result<(), String>,
    models: Option<Models>,
    progress: Option<Result<f64, String>>,
}

#[derive(Debug)]
struct Models {
    cards: Vec<Card>,
    max_model_len: Option<u64>,
}

/// Probes all backends of an admission.
#[derive(Debug)]
pub struct Prober {
    admission: Arc<Admission>,
    reported: Arc<Reported>,
    memory: HashMap<BackendId, Memory>,
}

impl Prober {
    /// A prober that writes into `admission` and `reported`.
    pub fn new(admission: Arc<Admission>, reported: Arc<Reported>) -> Self {
        Self { admission, reported, memory: HashMap::new() }
    }

    /// One round over all backends; whether the set of model names changed.
    pub async fn round(&mut self, rules: &Health) -> bool {
        let now = Instant::now();
        let silent = self.admission.silent(rules.stall, now);
        let mut asking = JoinSet::new();
        let mut known = Vec::new();
        for backend in self.admission.view().into_iter().flat_map(|pool| pool.backends) {
            known.push(backend.id);
            let memory = self.memory.entry(backend.id).or_default();
            let models_due = backend.phase == Phase::Starting
                || memory.models_at.is_none_or(|at| now.saturating_duration_since(at) >= MODELS_EVERY);
            let suspect = silent.contains(&backend.id);
            if !suspect {
                memory.suspected = None;
            }
            let about = (backend.id, Arc::clone(&backend.name));
            asking.spawn(ask(about, Arc::clone(&backend.address), rules.probe_timeout, models_due, suspect));
        }
        self.memory.retain(|id, _| known.contains(id));
        self.reported.keep(&known);
        let mut changed = false;
        while let Some(found) = asking.join_next().await {
            if let Ok(finding) = found {
                changed |= self.take_in(finding);
            }
        }
        changed
    }

    fn take_in(&mut self, finding: Finding) -> bool {
        let now = Instant::now();
        let moved = self.admission.probed(finding.id, finding.up.is_ok(), now);
        if let Some((before, after)) = moved {
            let why = finding.up.as_ref().err().map_or("its probe answers", String::as_str);
            tracing::info!(backend = %finding.name, from = before.label(), to = after.label(), why, "backend changed");
        }
        let Some(memory) = self.memory.get_mut(&finding.id) else { return false };
        if let Err(why) = &finding.up {
            memory.models_at = None;
            // Said once per silence; a change of state is said above.
            if !std::mem::replace(&mut memory.missed, true) && moved.is_none() {
                tracing::warn!(backend = %finding.name, why, "backend does not answer its probe");
            }
        } else {
            memory.missed = false;
        }
        if let Some(progress) = finding.progress {
            let stuck = match (&progress, memory.suspected) {
                (Ok(now), Some(before)) => *now <= before,
                (Ok(_), None) => false,
                (Err(_), first) => first.is_some(),
            };
            memory.suspected = Some(progress.unwrap_or(f64::INFINITY));
            if stuck {
                tracing::warn!(backend = %finding.name, "hung: requests in flight, no byte and no progress; ejected");
                self.admission.hung(finding.id, now);
                memory.suspected = None;
            }
        }
        let Some(models) = finding.models else { return false };
        memory.models_at = Some(now);
        self.admission.set_max_model_len(finding.id, models.max_model_len);
        self.reported.set(finding.id, models.cards)
    }
}

async fn ask(
    (id, name): (BackendId, Arc<str>),
    address: Arc<Address>,
    patience: Duration,
    models: bool,
    suspect: bool,
) -> Finding {
    let up = match fetch(&address, "/health", patience, HEALTH_BYTES).await {
        Ok((status, _)) if status.is_success() => Ok(()),
        Ok((status, _)) => Err(format!("/health answers {status}")),
        Err(error) => Err(error.to_string()),
    };
    let models = match models && up.is_ok() {
        true => read_models(&address, patience).await,
        false => None,
    };
    let progress = match suspect {
        true => Some(read_progress(&address, patience).await),
        false => None,
    };
    Finding { id, name, up, models, progress }
}

async fn read_models(address: &Address, patience: Duration) -> Option<Models> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Fields {
        id: String,
        max_model_len: Option<u64>,
    }
    let (status, body) = fetch(address, "/v1/models", patience, HEALTH_BYTES).await.ok()?;
    let list: List = status.is_success().then(|| serde_json::from_slice(&body).ok())??;
    let mut models = Models { cards: Vec::new(), max_model_len: None };
    for json in list.data.into_iter().take(CARDS_MAX) {
        if let Ok(fields) = serde_json::from_str::<Fields>(json.get()) {
            models.max_model_len = models.max_model_len.max(fields.max_model_len);
            models.cards.push(Card { id: fields.id, json });
        }
    }
    Some(models)
}

async fn read_progress(address: &Address, patience: Duration) -> Result<f64, String> {
    let (status, body) = fetch(address, "/metrics", patience, METRICS_BYTES).await.map_err(|e| e.to_string())?;
    if !status.is_success() {
        return Err(format!("/metrics answers {status}"));
    }
    let text = std::str::from_utf8(&body).map_err(|error| error.to_string())?;
    Ok(metrics::Snapshot::parse(text).progress())
}
