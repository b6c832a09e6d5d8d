//! `[[pool]]` and `[[pool.backend]]` in the form the gateway works with.
//!
//! A pool is a set of backends that may answer the same requests: the models it serves, the prompt
//! lengths it is for, how much each of its backends takes at once, and what happens to the rest.
//! Capacities are per backend, queue and policy per pool.
//!
//! A request's home is the one pool that serves its model and whose range contains its estimated
//! prompt length. `spill` names the pools it may go to when home has no room. Two pools may name each
//! other there: a request is never handed on twice.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::secret::Secret;
use super::server::Slo;
use sluice_core::base::{ModelId, PoolId, Tokens};

/// Backends that may answer the same requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Unique; a label of metrics and a response header.
    pub name: String,
    /// Models it serves.
    pub models: ModelScope,
    /// Estimated prompt lengths it is home to.
    pub prompt_tokens: PromptRange,
    /// How a backend with room is picked.
    pub policy: Policy,
    /// Requests in flight per backend, at least 1.
    pub slots: u32,
    /// Outstanding prompt + output tokens per backend; `None`: not limited. A request larger than this
    /// is admitted alone.
    pub tokens: Option<Tokens>,
    /// Prompt tokens per backend of requests whose first token has not been seen; `None`: not limited.
    pub prefill_tokens: Option<Tokens>,
    /// Bound on long prompts in prefill at once; `None`: not bounded.
    pub long_prefix: Option<LongPrefix>,
    /// Where requests wait for room.
    pub queue: Queue,
    /// Where a request may go when this pool has no room, in order of preference; never this pool.
    pub spill: Vec<PoolId>,
    /// Whether and how usage is requested from the engine for streams.
    pub usage: UsageInjection,
    /// Objectives of requests whose home this is (the global ones where the pool says nothing).
    pub slo: Slo,
    /// At least one.
    pub backends: Vec<Backend>,
}

/// Which models something applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelScope {
    /// `"*"`: every declared model, and any other that the backends report.
    All,
    /// These and no others; at least one, in order of the configuration, without repetition.
    Only(Vec<ModelId>),
}

impl ModelScope {
    /// Whether a declared model is included.
    pub fn includes(&self, model: ModelId) -> bool {
        match self {
            Self::All => true,
            Self::Only(models) => models.contains(&model),
        }
    }
}

/// Prompt lengths, half open: `min <= tokens < max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptRange {
    /// The smallest that is included.
    pub min: Tokens,
    /// The smallest that is no longer included, above `min`; `None`: without end.
    pub max: Option<Tokens>,
}

impl PromptRange {
    /// Whether a prompt of this length belongs here.
    pub fn contains(&self, tokens: Tokens) -> bool {
        self.min <= tokens && self.max.is_none_or(|max| tokens < max)
    }
}

impl fmt::Display for PromptRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.max {
            Some(max) => write!(f, "{} to {max}", self.min),
            None => write!(f, "{} and more", self.min),
        }
    }
}

/// How a backend with room is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The one with the least outstanding work in relation to its weight.
    LeastWork,
    /// The better of two random ones.
    TwoChoices,
    /// In turn, by weight.
    RoundRobin,
    /// Where a prompt with the same beginning went before, as long as it is not overloaded.
    PrefixAffinity,
}

/// Bound on prompts longer than `threshold` that are in prefill at once on one backend, home or spilled.
/// The permit returns at the first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongPrefix {
    /// Prompts of more than this many tokens need a permit.
    pub threshold: Tokens,
    /// Permits per backend; 0: such prompts never run here.
    pub slots: u32,
}

/// Where requests wait for room.
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    /// Most waiting requests; 503 beyond. 0: never wait.
    pub length: usize,
    /// Longest wait; 503 after it.
    pub timeout: Duration,
    /// Who is next.
    pub order: Order,
    /// With [`Order::ShortestFirst`]: how much later a request lines up for each 1,000 prompt tokens.
    pub aging_per_1k_tokens: Duration,
}

/// Who is next in a queue. Priority of the key comes before either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In order of arrival.
    Fifo,
    /// By `arrival + aging_per_1k_tokens * prompt_tokens / 1000`: short ones first, but a long one is
    /// overtaken only by those that came within its own handicap, so nothing starves.
    ShortestFirst,
}

/// Whether and how usage is requested from the engine for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageInjection {
    /// One usage event at the end, stripped again when the client did not ask for it.
    Final,
    /// Usage in every event, stripped again: exact tokens per event, but every event is edited.
    Continuous,
    /// Nothing is injected; tokens are counted by events.
    Off,
}

/// One vLLM server. Its identity over reloads is pool name, backend name and target.
#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    /// Unique within the pool; a label of metrics and a response header.
    pub name: String,
    /// Where it is.
    pub target: Target,
    /// Share of new work relative to the other backends of the pool, above 0.
    pub weight: f64,
    /// Sent upstream as `Authorization: Bearer`; `None`: no such header.
    pub api_key: Option<Secret>,
}

/// Where a backend is.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// An engine that somebody else runs.
    Url(Endpoint),
    /// An engine that we run, on loopback.
    Launch(Launch),
    /// An engine that commands start and stop, wherever it runs.
    Control(Endpoint, Control),
}

impl Target {
    /// Where requests go, whoever runs the engine.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            Self::Url(endpoint) | Self::Control(endpoint, _) => endpoint.clone(),
            Self::Launch(launch) => Endpoint { host: "127.0.0.1".to_owned(), port: launch.port, prefix: String::new() },
        }
    }
}

/// A place that speaks HTTP/1.1 without TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// Name or address in lower case; an IPv6 address without its brackets.
    pub host: String,
    /// TCP port; 0 only for an engine of ours whose port has not been chosen yet.
    pub port: u16,
    /// Put before the path of every request; empty, or begins with `/` and does not end with one.
    pub prefix: String,
}

impl Endpoint {
    /// `host:port` as it stands in a URL or a `Host` header.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority(), self.prefix)
    }
}

/// How an engine of ours is started.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Program and its first arguments, at least the program.
    pub command: Vec<String>,
    /// The port it is told to listen on, on loopback; 0: one of `fleet.ports` that is free, chosen when the gateway starts
    /// and kept from then on.
    pub port: u16,
    /// GPUs it may see, by index; empty: as the environment says.
    pub gpu: Vec<u16>,
    /// Added to its environment.
    pub env: BTreeMap<String, String>,
    /// Flags without their dashes, with values.
    pub args: BTreeMap<String, ArgValue>,
}

/// Commands by which an engine is started and stopped: programs and their arguments, no shell.
#[derive(Clone, Debug, PartialEq)]
pub struct Control {
    /// Brings it up and returns, at least the program.
    pub start: Vec<String>,
    /// Takes it down and returns, at least the program.
    pub stop: Vec<String>,
    /// Ends with status 0 while it runs; empty: nothing tells.
    pub status: Vec<String>,
    /// The longest that one of them may take.
    pub timeout: Duration,
    /// Flags of the engine, handed to `start`, without their dashes.
    pub args: BTreeMap<String, ArgValue>,
}

/// The value of a flag of an engine. In JSON it is the plain value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ArgValue {
    /// `true`: the flag alone; `false`: its `no-` form.
    Flag(bool),
    /// A whole number.
    Int(i64),
    /// A finite number.
    Float(f64),
    /// Anything else, also JSON.
    Text(String),
    /// A flag that takes several values.
    List(Vec<String>),
}
