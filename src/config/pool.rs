//! `[[pool]]`: backends that may answer the same requests.
//!
//! A pool has the models that it serves, the range of prompt lengths, the capacity of each backend,
//! and a queue for requests without room. Each backend has the capacity, while queue and policy
//! belong to the pool.
//!
//! The home of a request is the one pool that serves its model and whose range contains the
//! estimated prompt length. `spill` names the pools to which a request may go when home has no
//! room. Two pools may name each other, because a request spills at most once. The position of a
//! pool in the file is the [`PoolId`].

use std::fmt;
use std::time::Duration;

use super::autoscale::Autoscale;
use super::backend::Backend;
use super::certificates::UpstreamTls;
use super::fair::Fair;
use super::file::Entry;
use super::job::{Cost, check_path};
use super::key::KeySpec;
use super::limits;
use super::model::ModelScope;
use super::pods::Pods;
use super::pool_engine::PoolEngine;
use super::problem::{Situation, Suggestion};
use super::report::{Names, Place, Report};
use super::server::Slo;
use super::setting::{Setting, Shown, elements, list, quote};
use super::table::table;
use super::token_limit::TokenLimit;
use super::value::{check_name, words};
use sluice_core::base::{PoolId, Tokens};

table! {
    /// Backends that may answer the same requests.
    pub struct Pool {
        /// Name of the pool: a label of metrics and a response header. Unique.
        pub name: String = required("name the pool, such as \"short\"").check(check_name).example("default");
        /// Names or aliases of the models that the pool serves. "*" means all declared models, and
        /// other models that the backends report.
        pub models: ModelScope = default("[\"*\"]").at_most(limits::MAX_MODELS + limits::MAX_ALIASES);
        /// How the gateway picks one of the backends with room. least_work predicts on which engine
        /// the first token comes soonest and other requests are delayed least. For each engine it
        /// follows the prompt tokens in prefill, the decoding sequences and the outstanding tokens.
        /// From streams it learns how fast the engine is compared with the others, and how long
        /// short prompts wait there while a long one is in prefill. Short prompts (below 1,024
        /// tokens) avoid an engine in a long prefill as long as that costs more than another
        /// engine, and avoid each other. Long prompts go to the engine whose last long prompt is
        /// longest ago. An engine that got the beginning of a prompt before probably has it in the
        /// prefix cache. So a conversation stays on one engine, unless the wait there is longer
        /// than computing the prompt again. Equal engines get work in turn, unequal ones by their
        /// speed. Learned values are dropped with the engine, or after a minute without
        /// observations. There is nothing to set. For comparison: fewest_requests (in flight;
        /// nginx's least_conn), two_choices (the backend with fewer in flight of two random ones;
        /// nginx's random two least_conn), round_robin. All respect `weight`.
        pub policy: Policy = default("least_work");
        /// How least_work knows which engine has the beginning of a prompt in the prefix cache.
        /// "estimate": from the prompts that the engine got, and the size of the KV cache.
        /// "events": vLLM's KV events, which each engine publishes on `pool.backend.events_port`,
        /// correct the estimate: removed blocks are forgotten at once. Where no events come, the
        /// estimate remains.
        pub prefix: PrefixMemory = default("estimate");
        /// Kind of engine of all backends: its health page, metrics, routes and limits. "auto":
        /// probes recognise vllm, sglang, llama.cpp and triton; until then, for other servers, and
        /// for engines that the gateway starts, vllm. "openai" is
        /// any other server with the API of OpenAI, such as trtllm-serve or vLLM-Omni. "triton" is
        /// Triton with the protocol of KServe. "serial" is a process that does one job at a time
        /// (speech, images, a Flask program), one backend for each process.
        pub engine: PoolEngine = default("auto");
        /// Data-parallel ranks of each vLLM server of the pool; see pool.backend.ranks.
        pub ranks: Option<u16> = optional("as each backend says").within("1", limits::RANKS).example("4");
        /// Limit of sequences in flight per backend. A request takes its prompts or inputs times n,
        /// and gets 400 if that is more than the limit. Lower it when the engine's own queue grows.
        /// Engines that report fewer slots (llama.cpp, SGLang) get no more than they report. The
        /// default is 1 with engine = "serial".
        pub slots: u32 = default("256").within("1", "65536");
        /// Limit of outstanding prompt and output tokens per backend, such as the size of the
        /// engine's KV cache. A request that alone demands more (prompt and min_tokens) gets 400.
        /// "auto": none until an engine preempts requests; then a limit that is learned from that,
        /// and that refuses nothing. "unlimited": none.
        pub tokens: TokenLimit = default("auto").within("1", limits::TOKENS);
        /// Limit of prompt tokens in prefill per backend, that is, of requests that still wait for
        /// the first token. A prompt above the limit runs when no other prompt is in prefill.
        pub prefill_tokens: Option<Tokens> = optional("not limited").within("1", limits::TOKENS).example("16k");
        /// Paths of the engines besides those of the API, such as ["/synthesize"], with engine =
        /// "serial" and one model. Their
        /// bodies are passed on without being read.
        pub routes: Vec<String> = default("[]").check(check_path).at_most(limits::MAX_ROUTES);
        /// Cost of a request in place of its prompt tokens, if tokens do not measure the work.
        pub cost: Option<Cost> = optional("1 for each request that is not counted in tokens");
        /// Time without a byte after which a backend with running requests counts as hung, whatever
        /// its counters say. The only sign of a hang where an engine has no counters of its
        /// steps (serial, openai, triton); write more than the longest job takes.
        pub deadline: Option<Duration> = optional_duration("none; the engine's counters alone, as health.stall says").example("5m");
        /// Whether requests come to this pool only if an arm of an experiment names it. The pool's
        /// prompt_tokens then have no effect, and the pool does not make models available.
        pub arms_only: bool = default("false");
        /// Pools to which a request may go when this pool has no room, in order of preference. They
        /// must serve the models of this pool.
        pub spill: Vec<PoolId> = default("[]").at_most(limits::MAX_POOLS);
        /// Usage (token counts) that the gateway requests from the engine for streams: one event at
        /// the end, in every event (exact tokens per event, but every event is edited), or none.
        /// The gateway removes the usage that the client did not request.
        pub usage: UsageInjection = default("final");
        /// Order in which the engines serve the requests that they hold, as in their flag
        /// --scheduling-policy: "fcfs" or "priority". Engines with priority get the priority of
        /// each request; other engines get none. Engines that the gateway starts need no setting,
        /// because it reads their flags.
        pub scheduling_policy: Option<SchedulingPolicy> =
            optional("as the flags of engines that the gateway starts say; fcfs for others").example("priority");
        /// Prompt lengths (estimated) whose home is this pool. For each model, the ranges of all
        /// pools that serve it must cover every length exactly once.
        pub prompt_tokens: PromptRange = table();
        /// Limit on long prompts in prefill at once on a backend, home or spilled, so that short
        /// prompts keep moving. A prompt returns the permit at the first token.
        pub long_prefix: Option<LongPrefix> = optional("no bound");
        /// The queue in which requests wait for room.
        pub queue: Queue = table();
        /// Objectives of this pool where they differ from [slo].
        pub slo: Slo = table();
        /// TLS to the backends of this pool with an https url, unless the backend has its own
        /// table.
        pub tls: Option<UpstreamTls> = optional("the CAs that this machine trusts, and no own certificate");
        /// Backends that are pods of a Kubernetes cluster, in place of tables `backend`. Pods may
        /// come and go while the gateway runs. The gateway reaches the API server with the service
        /// account of its pod, or by KUBECONFIG.
        pub kubernetes: Option<Pods> = optional("backends are listed");
        /// Computes how many engines the pool should have for the expected load.
        pub autoscale: Option<Autoscale> = optional("not computed");
        /// One table per vLLM server.
        pub backends as "backend": Vec<Backend> = tables(limits::MAX_BACKENDS).in_force();
    }
}

table! {
    /// Prompt lengths, half open: `min <= tokens < max`.
    #[derive(Copy, Eq)]
    pub struct PromptRange {
        /// Smallest length in the range.
        pub min: Tokens = default("0").within("0", limits::TOKENS);
        /// End of the range; this length is not in the range.
        pub max: Option<Tokens> = optional("without end").within("1", limits::TOKENS).example("5k");
    }
}

impl PromptRange {
    /// Reports an empty range, which contains no prompt length.
    pub(super) fn check(&self, path: &str, report: &mut Report<'_>) {
        if let Some(max) = self.max.filter(|max| *max <= self.min && report.is_sound(path)) {
            report.add_at(path, Situation::EmptyRange { min: self.min.to_string(), max: max.to_string() });
        }
    }

    /// Whether a prompt of this length is in the range.
    pub fn contains(&self, tokens: Tokens) -> bool {
        self.min <= tokens && self.max.is_none_or(|max| tokens < max)
    }

    /// Whether the range has prompts of more than this length.
    pub fn exceeds(&self, tokens: Tokens) -> bool {
        self.max.is_none_or(|max| max.0.saturating_sub(1) > tokens.0)
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

table! {
    /// Limit on prompts longer than `threshold` that are in prefill at once on one backend, home or
    /// spilled. A prompt returns the permit at the first token.
    #[derive(Copy, Eq)]
    pub struct LongPrefix {
        /// Prompts of more than this many tokens need a permit.
        pub threshold: Tokens =
            required("write the prompt length from which a permit is needed").within("1", limits::TOKENS).example("5k");
        /// Permits per backend. With 0, such prompts never run here.
        pub slots: u32 = required("write how many such prompts may be in prefill at once on a backend").example("1");
    }
}

table! {
    /// The queue in which requests wait for room.
    pub struct Queue {
        /// Requests that may wait; a further request gets 503. With 0, none waits.
        pub length: usize = default("512").within("0", "100000");
        /// Longest time that a request waits; then it gets 503.
        pub timeout: Duration = duration("20s");
        /// Owners that take turns in the queue, among waiting requests of one priority. Next is the
        /// owner that has used the engines least, in seconds of engine time divided by weight.
        /// "key": the API key (auth.keys.weight). "user": the end user that the body names (`user`
        /// or `safety_identifier`); the users of a key divide the key's weight. { header =
        /// "x-tenant" }: the value of a header, which a trusted proxy should set. "off": all
        /// requests have one owner. `order` then applies to the requests of one owner. No engine
        /// stays idle for fairness, with one exception: while other owners are present, an owner's
        /// prompts use at most the owner's share of prefill.
        pub fair: Option<Fair> = optional("key if auth.keys are configured, otherwise off").example("\"key\"");
        /// Order of the waiting requests. The priority of a request comes first. In either order, a
        /// request is overtaken by at most `length` later requests, and only by requests that
        /// arrive in the first quarter of `timeout` after it.
        pub order: Order = default("shortest_first");
        /// Time added to the arrival for each 1,000 prompt tokens; shortest_first orders by the
        /// sum. So short prompts go first, but overtake a long prompt for at most the time added to
        /// it, and never for longer than a quarter of `timeout`. 0s: like fifo.
        pub aging_per_1k_tokens: Duration = duration_or_zero("500ms");
    }
}

words! {
    /// The choice among backends with room.
    pub enum Policy {
        /// The backend with the soonest predicted first token.
        LeastWork = "least_work",
        /// The backend with the fewest requests in flight in relation to the weight.
        FewestRequests = "fewest_requests",
        /// Of two random backends, the one with fewer in flight in relation to the weight.
        TwoChoices = "two_choices",
        /// In turn, by weight.
        RoundRobin = "round_robin",
    }
}

words! {
    /// How the gateway knows which engine has the beginning of a prompt.
    pub enum PrefixMemory {
        /// By the prompts that the engine got.
        Estimate = "estimate",
        /// By the engine's KV events, where they come.
        Events = "events",
    }
}

words! {
    /// The order of a queue. The priority of the request comes before either.
    pub enum Order {
        /// In order of arrival.
        Fifo = "fifo",
        /// By `arrival + aging_per_1k_tokens * prompt_tokens / 1000`: short prompts first, but a
        /// long one is overtaken only by prompts that arrive within that addition.
        ShortestFirst = "shortest_first",
    }
}

words! {
    /// The order in which engines serve the requests that they have.
    pub enum SchedulingPolicy {
        /// In order of arrival; a priority means nothing.
        Fcfs = "fcfs",
        /// By priority, lower first, then in order of arrival. Engines preempt requests for earlier
        /// ones.
        Priority = "priority",
    }
}

words! {
    /// Whether and how the gateway requests usage for streams.
    pub enum UsageInjection {
        /// One usage event at the end, removed again if the client did not request it.
        Final = "final",
        /// Usage in every event, removed again: exact tokens per event, but every event is edited.
        Continuous = "continuous",
        /// Nothing is injected; tokens are counted by events.
        Off = "off",
    }
}

/// Pools, written by name, without repetition and without the pool that names them.
impl Setting for Vec<PoolId> {
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let own = place.path.trim_start_matches("pool[").split(']').next().and_then(|index| index.parse().ok());
        let mut pools = Self::new();
        for (at, element) in elements(written, place, key, report)? {
            let Some(name) = <String as Setting>::read(element, &at, key, report) else { continue };
            let situation = match report.names.pools.iter().position(|known| *known == name) {
                None => {
                    let others = report.names.pools.iter().enumerate().filter(|(index, _)| Some(*index) != own);
                    let suggestion = Suggestion::for_name(&name, others.map(|(_, name)| name.as_str()));
                    Situation::UnknownPool { name, suggestion }
                }
                index if index == own => Situation::SpillToSelf,
                Some(index) if pools.contains(&PoolId::new(index)) => {
                    Situation::Duplicate { name, first: place.path.clone() }
                }
                Some(index) => {
                    pools.push(PoolId::new(index));
                    continue;
                }
            };
            report.add(&at, situation);
        }
        Some(pools)
    }

    fn show(&self, names: &Names) -> Shown {
        Shown::Value(list(&self.iter().map(|pool| quote(&names.pools[pool.index()])).collect::<Vec<_>>()))
    }
}
