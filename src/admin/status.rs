//! The types of `/admin/status`: written by the gateway, read by `sluice status` and the live page.
//!
//! Limits that are not set are absent. Times of day are RFC 3339 in UTC. Fields are only added. A
//! field that an older gateway does not send gets a default.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use sluice_config::{Class, PromptRange};
use sluice_core::base::Tokens;
use sluice_fleet::EngineView;
use sluice_fleet::discovery::PodsView;
use sluice_gateway::flow::keys::{KeyInFlight, KeyTokens};
use sluice_gateway::pool::{BackendView, Cordon, EventsView, LearnedTokens, Phase, PoolView, RecentAnswers};
use sluice_gateway::telemetry::{Telemetry, WindowStats};
use sluice_online::findings::{Finding, LastMinute};

/// The response to `/admin/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The process.
    #[serde(flatten)]
    pub about: About,
    /// Causes of slow requests, the most severe first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// The classes of requests in force.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassStatus>,
    /// Pools in the order of the configuration.
    pub pools: Vec<PoolStatus>,
    /// The pods of pools with a `kubernetes` table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kubernetes: Vec<PodsView>,
    /// This gateway's part in the ledger; absent without `[cluster]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
    /// Use of API keys with token limits at this gateway, nearest to a limit first; at most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyStatus>,
}

/// The response to `/admin/findings`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Diagnosis {
    /// Causes of slow requests, the most severe first.
    pub findings: Vec<Finding>,
    /// The last minute of each API key, most tokens first.
    pub keys: Vec<LastMinute>,
    /// The last minute of each backend.
    pub engines: Vec<LastMinute>,
    /// API keys with requests in flight on this gateway, most requests first; at most 256.
    pub in_flight: Vec<KeyInFlightStatus>,
}

/// Keys of the last minute in an event of the live page.
const KEYS_IN_EVENT: usize = 256;

impl Diagnosis {
    /// The part for the live page: the keys with most tokens, and no findings, which the status
    /// has.
    pub(super) fn for_page(mut self) -> Self {
        self.findings.clear();
        self.keys.truncate(KEYS_IN_EVENT);
        self
    }
}

/// The amounts that one API key has in flight, with limits of all gateways together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyInFlightStatus {
    /// The key's name.
    pub name: String,
    /// Requests.
    pub requests: Used,
    /// Sequences.
    pub sequences: Used,
    /// Tokens of prompts and expected outputs.
    pub tokens: Used,
}

impl From<KeyInFlight> for KeyInFlightStatus {
    fn from(key: KeyInFlight) -> Self {
        let used = |(used, limit): (u64, Option<u64>)| Used { used, limit };
        Self {
            name: key.name.to_string(),
            requests: used(key.requests),
            sequences: used(key.sequences),
            tokens: used(key.tokens),
        }
    }
}

/// A class of `[[class]]`; a request is in the first class that matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassStatus {
    /// The name.
    pub name: String,
    /// Smallest prompt length.
    pub min_tokens: u64,
    /// Prompts are shorter than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Whether requests have (true) or lack (false) an adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<bool>,
    /// Whether requests generate tokens (true) or not (false).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generates: Option<bool>,
}

impl From<&Class> for ClassStatus {
    fn from(class: &Class) -> Self {
        let range = class.prompt_tokens;
        Self {
            name: class.name.clone(),
            min_tokens: range.min.0,
            max_tokens: range.max.map(|max| max.0),
            adapter: class.adapter,
            generates: class.generates,
        }
    }
}

impl From<&ClassStatus> for Class {
    /// The class without objectives.
    fn from(class: &ClassStatus) -> Self {
        let range = PromptRange { min: Tokens(class.min_tokens), max: class.max_tokens.map(Tokens) };
        Self { adapter: class.adapter, generates: class.generates, ..Self::of_lengths(&class.name, range) }
    }
}

/// The part of each token limit of one API key that the key has used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyStatus {
    /// The key's name.
    pub name: String,
    /// Tokens that the key's rate has not paid off yet, and `tokens_per_minute`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minute: Option<Used>,
    /// Tokens used within the last 24 hours, and `tokens_per_day`.
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
    /// This gateway's name.
    pub name: String,
    /// Identity in the ledger: the name, and a number that is new at every start.
    pub id: String,
    /// `keep` or `strict`.
    pub mode: String,
    /// The place of the ledger.
    pub store: String,
    /// `joining`, `holding`, `keeping`, `stopped` or `standing_back`.
    pub standing: String,
    /// Whether `/ready` may be 200 as far as the ledger decides.
    pub ready: bool,
    /// Why the gateway may use less than its part of the limits, with the last failure of the
    /// store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Seconds since the last confirmed renewal was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed_seconds: Option<f64>,
    /// The names of all gateways in the ledger.
    pub gateways: Vec<String>,
    /// The leader; absent if none is elected (`cluster.leader`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<LeaderStatus>,
}

/// The leader as this gateway sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaderStatus {
    /// Whether this gateway leads.
    pub leads: bool,
    /// The leader's name, as last seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seconds since the leader changed or was lost.
    pub seconds: f64,
    /// Whether only the leader is ready.
    pub only_it_serves: bool,
    /// The last failure of the store, or the reason why this leader does not manage engines yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The process and its configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct About {
    /// The gateway's version.
    pub version: String,
    /// Seconds since the start of the gateway.
    pub uptime_seconds: f64,
    /// The address of the client port.
    pub listen: String,
    /// The configuration file; absent if there is none.
    pub config: Option<String>,
    /// Whether the gateway will shut down: `/ready` is 503, and requests are served as before.
    #[serde(default)]
    pub leaving: bool,
    /// Whether new requests are shed, while running ones finish.
    pub shutting_down: bool,
    /// The last reload, if there was one.
    pub last_reload: Option<LastReload>,
    /// Replacements of the configuration since the start, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub applied: Vec<Applied>,
}

/// One replacement of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Applied {
    /// Seconds since the replacement.
    pub seconds_ago: f64,
    /// The name of the configuration; absent for a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
}

/// The last reload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastReload {
    /// The time at the end of the reload.
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
    /// The pool's name.
    pub name: String,
    /// The kind of the pool's engines, configured or found by a probe; empty without a backend.
    pub kind: String,
    /// Differences between the pool's engines: models that one lacks, and context limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engines_differ: Option<String>,
    /// Requests waiting.
    pub queue: Used,
    /// The last minute of requests that belong to this pool, also if they spilled to another.
    pub last_minute: WindowStats,
    /// [`last_minute`](Self::last_minute) for five minutes.
    pub last_5_minutes: WindowStats,
    /// The pool's backends.
    pub backends: Vec<BackendStatus>,
}

/// How much of a limit is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// The amount in use.
    pub used: u64,
    /// The limit; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// One backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendStatus {
    /// The backend's name.
    pub name: String,
    /// The engine's address.
    pub url: String,
    /// `starting`, `ready`, `probation`, `ejected`, `down`, `draining`, `idle` (autoscaling wants
    /// fewer engines) or `removed`.
    pub state: String,
    /// Why the backend is out of rotation or failing, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether most of the last answers failed, even without ejection.
    pub failing: bool,
    /// Share of new work.
    pub weight: f64,
    /// Requests that hold a lease.
    pub in_flight: u64,
    /// Sequences in flight.
    pub slots: Used,
    /// Outstanding tokens of prompts and outputs, estimated.
    pub tokens: Used,
    /// Why there is a limit of outstanding tokens, if the gateway has learned it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_limit_reason: Option<String>,
    /// Prompt tokens whose first output token was not seen yet, estimated.
    pub prefill_tokens: Used,
    /// Long prompts in prefill, each with a permit.
    pub long_prefills: Used,
    /// This gateway's share by the ledger, by unit (`slots`, `tokens`, `prefill_tokens`,
    /// `permits`); empty without `[cluster]`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub share: BTreeMap<String, u64>,
    /// Prompts with more tokens need a permit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_threshold: Option<u64>,
    /// Observed milliseconds per output token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Observed prompt tokens per second until the first token, with the wait in the engine. Before
    /// the first observation, it is a guess.
    pub prefill_tokens_per_second: f64,
    /// Seconds since the last observation; absent before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_seen_seconds: Option<f64>,
    /// Seconds for which the engine has sent nothing with requests in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub silent_seconds: Option<f64>,
    /// The engine's context limit, once reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u64>,
    /// Why the models of the backend are unknown: it gets requests for every model of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models_unknown: Option<String>,
    /// The engine's KV events, in a pool with `prefix = "events"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<KvEventsStatus>,
    /// The repair, if the engine is of another kind than the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_differs: Option<String>,
    /// The backend's engine, if the gateway runs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineView>,
}

/// The KV events of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KvEventsStatus {
    /// `followed`, `absent` (no connection or no event yet) or `silent`.
    pub state: String,
    /// Blocks in the prefix cache that the events have named.
    pub blocks: u64,
    /// Finished prompts whose blocks the events named.
    pub linked: u64,
    /// Finished prompts whose blocks they did not name.
    pub unlinked: u64,
    /// How often events were lost.
    pub losses: u64,
}

impl From<EventsView> for KvEventsStatus {
    fn from(view: EventsView) -> Self {
        let EventsView { state, blocks, linked, unlinked, losses } = view;
        Self { state: state.label().to_owned(), blocks, linked, unlinked, losses }
    }
}

/// A model that clients may ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelStatus {
    /// The model's name.
    pub name: String,
    /// Other names of the model.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Whether the model is a LoRA adapter.
    pub adapter: bool,
    /// Whether the configuration has the model. If not, engines have reported it.
    pub declared: bool,
    /// The pools that serve the model.
    pub pools: Vec<String>,
    /// Numbers of backends in rotation in these pools: the backends with the model, and all
    /// backends.
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
            kind: String::new(),
            engines_differ: None,
            queue: Used { used: pool.queue_length as u64, limit: Some(pool.queue_limit as u64) },
            last_minute: telemetry.minute(&pool.name),
            last_5_minutes: telemetry.five_minutes(&pool.name),
            backends: pool
                .backends
                .iter()
                .map(|backend| BackendStatus {
                    engine: engine(&pool.name, &backend.engine_name()).filter(|_| !backend.removed),
                    ..BackendStatus::new(backend, now)
                })
                .collect(),
        };
        Self { about, pools: pools.iter().map(pool).collect(), ..Self::default() }
    }
}

/// The reason for a learned limit of tokens.
fn learned(learned: LearnedTokens) -> String {
    let LearnedTokens { preempted, outstanding, .. } = learned;
    format!("the engine preempted {preempted} requests with {outstanding} tokens outstanding")
}

impl BackendStatus {
    /// The state for people: "drained" once a draining backend has no requests in flight.
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
            // A cordoned engine is expected to fail probes, so a failed probe is no reason.
            reason: reason(backend, now).filter(|_| backend.cordon == Cordon::Open),
            failing: backend.recent.is_failing(),
            weight: backend.weight,
            in_flight: used.requests.into(),
            slots: Used { used: used.slots.into(), limit: Some(limits.slots.into()) },
            tokens: Used { used: used.tokens, limit: backend.token_limit() },
            tokens_limit_reason: backend.learned.map(learned),
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
            kv_events: backend.events.map(KvEventsStatus::from),
            engine_differs: None,
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
