//! The types of `/admin/status`: written by the gateway, read by `sluice status` and the live page.
//!
//! Limits that are not set are absent. Times of day are RFC 3339 in UTC; the names of durations have their unit. Fields are
//! only ever added. A field that an older gateway does not send has its default.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::error::NoSuchBackend;
use crate::base::BackendId;
use crate::fleet::EngineView;
use crate::fleet::discovery::PodsView;
use crate::flow::keys::KeyTokens;
use crate::pool::{BackendView, Cordon, Phase, PoolView, RecentAnswers};
use crate::telemetry::{Telemetry, WindowStats};

/// The response to `/admin/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The process.
    #[serde(flatten)]
    pub about: About,
    /// Pools in the order of the configuration.
    pub pools: Vec<PoolStatus>,
    /// The pods of the pools that have a kubernetes table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes: Vec<PodsView>,
    /// This gateway's part in the ledger of several gateways; absent without [cluster].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
    /// Tokens that API keys have used here of their token limits, keys nearest to a limit first; at
    /// most 256 keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyStatus>,
}

/// Tokens that one API key has used of its token limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyStatus {
    /// Name of the key.
    pub name: String,
    /// Tokens that the key's rate has not paid off yet, and `tokens_per_minute`. The tokens exceed
    /// the limit while the key owes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minute: Option<Used>,
    /// Tokens that the key has used within the last 24 hours, and `tokens_per_day`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub day: Option<Used>,
}

impl From<KeyTokens> for KeyStatus {
    fn from(key: KeyTokens) -> Self {
        let used = |counts: Option<(u64, u64)>| counts.map(|(used, limit)| Used { used, limit: Some(limit) });
        Self { name: key.name.to_string(), minute: used(key.minute), day: used(key.day) }
    }
}

/// This gateway's part in the ledger of several gateways.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// The name of this gateway.
    pub name: String,
    /// Its identity in the ledger: the name, and a number that is new with every start.
    pub id: String,
    /// keep or strict.
    pub mode: String,
    /// Where the ledger is.
    pub store: String,
    /// joining, holding, keeping, stopped or standing_back.
    pub standing: String,
    /// `/ready` does not say 503 because of the ledger.
    pub ready: bool,
    /// Why it may use less than it could, or nothing, and what the store last failed with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Time since the last confirmed renewal was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed_seconds: Option<f64>,
    /// The names of the gateways in the ledger, this one included.
    pub gateways: Vec<String>,
    /// Which gateway leads; absent where none is elected (cluster.leader).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<LeaderStatus>,
}

/// Which of several gateways leads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaderStatus {
    /// This one leads.
    pub leads: bool,
    /// The name of the one that leads, as last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Since when that is the one, or since when none leads.
    pub seconds: f64,
    /// The others are not ready.
    pub only_it_serves: bool,
    /// What the store last failed with, or what this one waits for to manage engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The process and its configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct About {
    /// The gateway's version.
    pub version: String,
    /// Time since the gateway was started.
    pub uptime_seconds: f64,
    /// The address of the client port.
    pub listen: String,
    /// The configuration file; absent when the gateway was started with flags only.
    pub config: Option<String>,
    /// It will shut down: `/ready` is 503, and requests are served as before.
    #[serde(default)]
    pub leaving: bool,
    /// New requests are shed; running ones finish.
    pub shutting_down: bool,
    /// The last reload, if there was one.
    pub last_reload: Option<LastReload>,
    /// When the configuration was replaced while the process ran, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub applied: Vec<Applied>,
}

/// One replacement of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Applied {
    /// How long ago.
    pub seconds_ago: f64,
    /// The name of the configuration, where the program that applied it gave one; a reload of a file gives none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

/// The last reload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastReload {
    /// When it ended.
    pub time: String,
    /// Whether the configuration was applied.
    pub ok: bool,
    /// The changes, or the problems.
    pub lines: Vec<String>,
}

/// One pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolStatus {
    /// Its name.
    pub name: String,
    /// In what its engines differ: models that one lacks and another has, and context limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engines_differ: Option<String>,
    /// Requests waiting.
    pub queue: Used,
    /// The last minute of the requests that belong to this pool, including those that spilled to another.
    pub last_minute: WindowStats,
    /// The same of the last five minutes: the window of every number that the page, `sluice status` and `sluice top` show.
    pub last_5_minutes: WindowStats,
    /// Its backends.
    pub backends: Vec<BackendStatus>,
}

/// How much of a limit is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// How much is used now.
    pub used: u64,
    /// The limit; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// One backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendStatus {
    /// Its name.
    pub name: String,
    /// The address of its engine.
    pub url: String,
    /// starting, ready, probation, ejected, down, draining, idle (autoscaling wants fewer engines) or removed.
    pub state: String,
    /// Why it is out of rotation or failing, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Most of its last answers failed, whether it was ejected for that or not.
    pub failing: bool,
    /// Share of new work.
    pub weight: f64,
    /// Requests that hold a lease.
    pub in_flight: u64,
    /// Sequences.
    pub slots: Used,
    /// Outstanding prompt and output tokens, estimated.
    pub tokens: Used,
    /// Prompt tokens whose first output token has not been seen, estimated.
    pub prefill_tokens: Used,
    /// Long prompts in prefill, each with a permit.
    pub long_prefills: Used,
    /// What this gateway may use by the ledger of several gateways, by unit (slots, tokens, prefill_tokens, permits); empty without
    /// [cluster].
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub share: BTreeMap<String, u64>,
    /// Prompts over this many tokens need a permit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_threshold: Option<u64>,
    /// Time per output token as observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Prompt tokens per second until the first token, waiting in the engine included, as observed (a guess before the first
    /// long enough prompt).
    pub prefill_tokens_per_second: f64,
    /// How long ago that was last observed; absent: it is the guess.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_seen_seconds: Option<f64>,
    /// Requests are in flight, and its engine has sent no byte for this long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silent_seconds: Option<f64>,
    /// The engine's context limit, once it has reported it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    /// Why it is not known which models it serves: it gets requests for every model of its pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models_unknown: Option<String>,
    /// The engine behind it, when the gateway runs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineView>,
}

/// A model that clients may ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelStatus {
    /// Its name.
    pub name: String,
    /// Other names for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// It is a LoRA adapter.
    pub adapter: bool,
    /// It is in the configuration; otherwise engines have reported it.
    pub declared: bool,
    /// The pools that serve it.
    pub pools: Vec<String>,
    /// Backends of these pools in rotation that report it, and all that are in rotation.
    pub serving: (usize, usize),
}

impl Status {
    /// The status of `pools` at `now`.
    pub fn new(about: About, pools: &[PoolView], engines: &[EngineView], telemetry: &Telemetry, now: Instant) -> Self {
        let engine = |pool: &str, name: &str| {
            let is_it = |view: &&EngineView| view.backend.split_once('/') == Some((pool, name));
            engines.iter().find(is_it).cloned()
        };
        let pool = |pool: &PoolView| PoolStatus {
            name: pool.name.to_string(),
            engines_differ: None,
            queue: Used { used: pool.queue_length as u64, limit: Some(pool.queue_limit as u64) },
            last_minute: telemetry.minute(&pool.name),
            last_5_minutes: telemetry.five_minutes(&pool.name),
            backends: pool
                .backends
                .iter()
                .map(|backend| BackendStatus {
                    engine: engine(&pool.name, &backend.name).filter(|_| !backend.removed),
                    ..BackendStatus::new(backend, now)
                })
                .collect(),
        };
        Self { about, pools: pools.iter().map(pool).collect(), kubernetes: Vec::new(), cluster: None, keys: Vec::new() }
    }
}

impl BackendStatus {
    /// Its state for people: one that drains, and has nothing left in flight, is drained.
    pub fn shown_state(&self) -> &str {
        match self.state.as_str() {
            "draining" if self.in_flight == 0 => "drained",
            state => state,
        }
    }

    fn new(backend: &BackendView, now: Instant) -> Self {
        let (limits, used) = (&backend.limits, &backend.used);
        let since = |moment: Instant| now.saturating_duration_since(moment).as_secs_f64();
        Self {
            name: backend.name.to_string(),
            url: backend.address.endpoint.to_string(),
            state: backend.state().to_owned(),
            // While its engine is cordoned, failed probes are expected.
            reason: reason(backend, now).filter(|_| backend.cordon == Cordon::Open),
            failing: backend.recent.is_failing(),
            weight: backend.weight,
            in_flight: used.requests.into(),
            slots: Used { used: used.slots.into(), limit: Some(limits.slots.into()) },
            tokens: Used { used: used.tokens, limit: limits.tokens },
            prefill_tokens: Used { used: used.prefill_tokens, limit: limits.prefill_tokens },
            long_prefills: Used {
                used: used.long_prefills.into(),
                limit: limits.long_prefix.map(|long| long.slots.into()),
            },
            share: backend.share_of_limits().into_iter().map(|(unit, share)| (unit.to_owned(), share)).collect(),
            long_threshold: limits.long_prefix.map(|long| long.threshold),
            tpot_ms: backend.seconds_per_token.map(|seconds| seconds * 1e3),
            prefill_tokens_per_second: backend.prefill_rate,
            prefill_seen_seconds: backend.prefill_seen.map(since),
            silent_seconds: backend.silent_since.map(since),
            max_model_len: backend.max_model_len,
            models_unknown: None,
            engine: None,
        }
    }
}

fn reason(backend: &BackendView, now: Instant) -> Option<String> {
    let RecentAnswers { failed, seen } = backend.recent;
    let answers = matches!(backend.phase, Phase::Ready | Phase::Probation | Phase::Ejected { .. });
    if let Some(refused) = backend.refused.filter(|_| answers) {
        return Some(refused.text(backend.address.api_key.is_some()));
    }
    let reason = match backend.phase {
        Phase::Starting => "no probe has succeeded yet".to_owned(),
        Phase::Ready if backend.recent.is_failing() => format!("{failed} of the last {seen} answers failed"),
        Phase::Ready => return None,
        Phase::Probation => "on trial with one request at a time".to_owned(),
        Phase::Ejected { until, fault } => {
            let left = until.saturating_duration_since(now);
            let then = if left > Duration::ZERO {
                format!("out for {:.0} s more", left.as_secs_f64().ceil())
            } else {
                "out until a probe succeeds".to_owned()
            };
            format!("{}, {then}", fault.text())
        }
        Phase::Down => "its probes fail; the log of the gateway says why".to_owned(),
    };
    Some(reason)
}

/// The backend of these names, for implementations of [`Control`](super::Control). A backend that is being removed is not
/// found.
pub fn find(pools: &[PoolView], pool: &str, backend: &str) -> Result<BackendId, NoSuchBackend> {
    let Some(found) = pools.iter().find(|view| &*view.name == pool) else {
        let known = names(pools.iter().map(|view| &*view.name));
        return Err(NoSuchBackend::Pool { pool: pool.to_owned(), known });
    };
    let mut staying = found.backends.iter().filter(|view| !view.removed);
    match staying.clone().find(|view| &*view.name == backend) {
        Some(view) => Ok(view.id),
        None => Err(NoSuchBackend::Backend {
            pool: pool.to_owned(),
            backend: backend.to_owned(),
            known: names(staying.by_ref().map(|view| &*view.name)),
        }),
    }
}

/// Most names in a message.
const NAMES_SHOWN: usize = 20;

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = all.collect();
    let mut text = names[..names.len().min(NAMES_SHOWN)].join(", ");
    if names.len() > NAMES_SHOWN {
        text.push_str(&format!(" and {} more", names.len() - NAMES_SHOWN));
    }
    text
}
