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
//! works has moved for a third of `health.stall`, or nobody answers, it is hung: ejected, and its streams are cut so
//! that they can be tried elsewhere or end honestly. One long answer that is not streamed shows no bytes
//! either, but its engine's counters move; a long prefill moves no counter, but takes KV blocks.
//! An engine that answers without vLLM's numbers (`--disable-log-stats`) is never called hung: nothing
//! tells one long answer from a standstill, and the timeouts of requests still bound it.
//!
//! A finding belongs to the backend that was asked. A reload may give its id to another one meanwhile: then it is dropped.
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
use sluice_gateway::pool::{Address, Admission, Cordon, Phase};

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
pub struct ModelCard {
    /// The name.
    pub id: String,
    /// The whole card, JSON.
    pub json: Box<RawValue>,
}

/// What backends say they serve.
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

    /// The names that one backend serves.
    pub fn of(&self, backend: BackendId) -> Vec<String> {
        let by_backend = self.0.lock();
        by_backend.get(&backend).into_iter().flatten().map(|card| card.id.clone()).collect()
    }

    /// Every name.
    pub fn names(&self) -> Vec<String> {
        self.cards().into_iter().map(|card| card.id).collect()
    }

    /// Replaces what a backend serves; whether the names changed.
    fn set(&self, backend: BackendId, cards: Vec<ModelCard>) -> bool {
        let mut by_backend = self.0.lock();
        let same = by_backend
            .get(&backend)
            .is_some_and(|old| old.len() == cards.len() && old.iter().zip(&cards).all(|(a, b)| a.id == b.id));
        by_backend.insert(backend, cards);
        !same
    }

    /// Forgets all backends but these; whether there was one to forget.
    fn keep(&self, known: &[BackendId]) -> bool {
        let mut by_backend = self.0.lock();
        let before = by_backend.len();
        by_backend.retain(|id, _| known.contains(id));
        by_backend.len() < before
    }
}

/// What is remembered about a backend between ticks.
#[derive(Debug, Default)]
struct Memory {
    models_at: Option<Instant>,
    /// The last probe was missed.
    missed: bool,
    /// Since when a suspect has shown the same; `None` instead of marks: it did not answer.
    suspected: Option<(Instant, Option<Marks>)>,
}

/// What changes while an engine works: its counters, and its share of KV blocks in use.
type Marks = (f64, f64);

/// What a suspect shows of its progress.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sign {
    Marks(Marks),
    /// It answers, but not with vLLM's numbers.
    NoNumbers,
    NoAnswer,
}

impl Memory {
    /// Takes in what a suspect shows; whether it has stood still for at least `patience`.
    fn stands_still(&mut self, sign: Sign, patience: Duration, now: Instant) -> bool {
        let shown = match sign {
            Sign::Marks(marks) => Some(marks),
            Sign::NoAnswer => None,
            Sign::NoNumbers => {
                self.suspected = None;
                return false;
            }
        };
        match self.suspected {
            Some((since, before)) if shown.is_none() || shown == before => {
                now.saturating_duration_since(since) >= patience
            }
            _ => {
                self.suspected = Some((now, shown));
                false
            }
        }
    }
}

/// Share of `health.stall` for which a suspect must stand still: an engine's step may outlast a tick.
const STILL_SHARE: u32 = 3;

/// What one round found out about one backend.
struct Finding {
    id: BackendId,
    name: Arc<str>,
    address: Arc<Address>,
    up: Result<(), String>,
    models: Option<Models>,
    progress: Option<Sign>,
}

#[derive(Debug)]
struct Models {
    cards: Vec<ModelCard>,
    max_model_len: Option<u64>,
}

/// Probes all backends of an admission.
#[derive(Debug)]
pub struct Prober {
    admission: Arc<Admission>,
    reported: Arc<ReportedModels>,
    memory: HashMap<BackendId, Memory>,
    /// The set of model names has changed and nobody was told yet; survives a round that is given up half way.
    changed: bool,
}

impl Prober {
    /// A prober that writes into `admission` and `reported`.
    pub fn new(admission: Arc<Admission>, reported: Arc<ReportedModels>) -> Self {
        Self { admission, reported, memory: HashMap::new(), changed: false }
    }

    /// Whether its engine is known to be away: it starts, or is being stopped.
    fn is_away(&self, backend: BackendId) -> bool {
        let mut backends = self.admission.view().into_iter().flat_map(|pool| pool.backends);
        backends.any(|view| view.id == backend && view.cordon != Cordon::Open)
    }

    /// One round over all backends; whether the set of model names changed since a round last came to its end.
    pub async fn round(&mut self, rules: &Health) -> bool {
        let now = Instant::now();
        let silent = self.admission.silent_backends(rules.stall, now);
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
        self.changed |= self.reported.keep(&known);
        while let Some(found) = asking.join_next().await {
            if let Ok(finding) = found {
                self.changed |= self.take_in(finding, rules.stall / STILL_SHARE);
            }
        }
        std::mem::take(&mut self.changed)
    }

    fn take_in(&mut self, finding: Finding, patience: Duration) -> bool {
        let now = Instant::now();
        if !self.admission.is_same_backend(finding.id, &finding.name, &finding.address) {
            return false;
        }
        let moved = self.admission.record_probe(finding.id, finding.up.is_ok(), now);
        if let Some((before, after)) = moved {
            let why = finding.up.as_ref().err().map_or("its probe answers", String::as_str);
            tracing::info!(backend = %finding.name, from = before.label(), to = after.label(), why, "backend changed");
        }
        let is_away = finding.up.is_err() && self.is_away(finding.id);
        let Some(memory) = self.memory.get_mut(&finding.id) else { return false };
        if let Err(why) = &finding.up {
            memory.models_at = None;
            // Said once per silence; a change of state is said above.
            if !std::mem::replace(&mut memory.missed, true) && moved.is_none() && !is_away {
                tracing::warn!(backend = %finding.name, why, "backend does not answer its probe");
            }
        } else {
            memory.missed = false;
        }
        if let Some(sign) = finding.progress
            && memory.stands_still(sign, patience, now)
        {
            tracing::warn!(backend = %finding.name, "hung: requests in flight, no byte and no progress; ejected");
            self.admission.mark_hung(finding.id, now);
            memory.suspected = None;
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
    Finding { id, name, address, up, models, progress }
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
            models.cards.push(ModelCard { id: fields.id, json });
        }
    }
    Some(models)
}

async fn read_progress(address: &Address, patience: Duration) -> Sign {
    let Ok((status, body)) = fetch(address, "/metrics", patience, METRICS_BYTES).await else { return Sign::NoAnswer };
    let page = metrics::MetricsSnapshot::parse(std::str::from_utf8(&body).unwrap_or_default());
    match status.is_success() && page.samples > 0 {
        true => Sign::Marks((page.progress(), page.kv_usage)),
        false => Sign::NoNumbers,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use sluice_gateway::config::{Endpoint, Policy};
    use sluice_gateway::pool::{BackendLimits, BackendSpec, HealthRules, PoolRules, PoolSpec, QueueOrder};

    const RULES: HealthRules = HealthRules {
        probe_failures: 2,
        request_failures: 3,
        eject_base: Duration::from_secs(1),
        eject_max: Duration::from_secs(30),
    };

    fn spec(ports: &[u16]) -> PoolSpec {
        let limits = BackendLimits { slots: 4, tokens: None, prefill_tokens: None, long_prefix: None };
        let backend = |port: &u16| {
            let endpoint = Endpoint { host: "127.0.0.1".to_owned(), port: *port, prefix: String::new() };
            let address = Arc::new(Address { authority: endpoint.authority().into(), endpoint, api_key: None });
            BackendSpec { name: port.to_string().into(), address, weight: 1.0 }
        };
        let rules = PoolRules {
            policy: Policy::LeastWork,
            limits,
            queue_length: 8,
            queue_timeout: Duration::from_secs(20),
            order: QueueOrder::FIFO,
        };
        PoolSpec { name: "p".into(), rules, backends: ports.iter().map(backend).collect(), spill: vec![] }
    }

    fn prober(ports: &[u16]) -> Prober {
        let now = Instant::now();
        let admission = Admission::new(now, RULES, 1);
        admission.apply(&[spec(ports)], RULES, now);
        Prober::new(admission, Arc::default())
    }

    /// An engine that answers every request with a model list; a mute one takes connections and says nothing.
    async fn engine(mute: bool) -> u16 {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = socket.local_addr().unwrap().port();
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut connection, _)) = socket.accept().await {
                if !mute {
                    let _ = connection.read(&mut [0; 1024]).await;
                    let list = r#"{"data":[{"id":"m"}]}"#;
                    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{list}", list.len());
                    let _ = connection.write_all(answer.as_bytes()).await;
                }
                open.push(connection);
            }
        });
        port
    }

    #[tokio::test]
    async fn names_learned_in_a_round_that_was_given_up_are_told_by_the_next() {
        let mut prober = prober(&[engine(false).await, engine(true).await]);
        let second = Duration::from_secs(1);
        let rules = Health {
            probe_interval: second,
            probe_timeout: second,
            failures: 3,
            ejection_base: second,
            ejection_max: second,
            stall: 30 * second,
        };
        let reported = Arc::clone(&prober.reported);
        let learned = async {
            while reported.names().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            _ = prober.round(&rules) => panic!("the mute one holds the round up"),
            () = learned => {}
        }
        assert!(prober.round(&rules).await);
        assert!(!prober.round(&rules).await);
    }

    #[tokio::test]
    async fn a_finding_is_not_held_against_the_backend_that_has_its_id_now() {
        let mut prober = prober(&[1]);
        let old = prober.admission.view()[0].backends[0].clone();
        prober.memory.entry(old.id).or_default();
        for port in [2, 3] {
            prober.admission.apply(&[spec(&[port])], RULES, Instant::now());
        }
        let new = prober.admission.view()[0].backends[0].clone();
        assert_eq!(new.id, old.id, "ids are used again");
        let finding =
            Finding { id: old.id, name: old.name, address: old.address, up: Ok(()), models: None, progress: None };
        prober.take_in(finding, Duration::ZERO);
        assert_eq!(prober.admission.view()[0].backends[0].phase, Phase::Starting);
    }

    #[test]
    fn only_an_engine_that_shows_the_same_for_long_enough_stands_still() {
        let patience = Duration::from_secs(10);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let judged = |signs: &[(u64, Sign)]| {
            let mut memory = Memory::default();
            signs.iter().map(|(second, sign)| memory.stands_still(*sign, patience, at(*second))).collect::<Vec<_>>()
        };
        let same = Sign::Marks((5.0, 0.5));
        assert_eq!(judged(&[(0, same), (2, same), (10, same)]), [false, false, true]);
        let prefilling = Sign::Marks((5.0, 0.6));
        assert_eq!(
            judged(&[(0, same), (9, prefilling), (18, prefilling), (19, prefilling)]),
            [false, false, false, true]
        );
        assert_eq!(judged(&[(0, Sign::NoAnswer), (10, same)]), [false, false], "one missed answer proves nothing");
        assert_eq!(judged(&[(0, same), (10, Sign::NoAnswer)]), [false, true]);
        assert_eq!(judged(&[(0, Sign::NoNumbers), (60, Sign::NoNumbers)]), [false, false]);
    }
}
