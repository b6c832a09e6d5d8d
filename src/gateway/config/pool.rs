//! `[[pool]]`: backends that may answer the same requests.
//!
//! A pool has the models that it serves, the range of prompt lengths, the capacity of each backend,
//! and a queue for requests without room. Capacities are per backend, queue and policy per pool.
//!
//! The home of a request is the one pool that serves its model and whose range contains the
//! estimated prompt length. `spill` names the pools to which a request may go when home has no
//! room. Two pools may name each other, because a request spills at most once. The position of a
//! pool in the file is the [`PoolId`].

use std::fmt;
use std::time::Duration;

use super::autoscale::Autoscale;
use super::backend::Backend;
use super::fair::Fair;
use super::file::Entry;
use super::key::KeySpec;
use super::limits;
use super::model::ModelScope;
use super::pods::Pods;
use super::problem::{Situation, Suggestion};
use super::report::{Names, Place, Report};
use super::server::Slo;
use super::setting::{Setting, Shown, elements, list, quote};
use super::table::table;
use super::tls::UpstreamTls;
use super::value::{check_name, words};
use sluice_core::base::{PoolId, Tokens};

table! {
    /// Backends that may answer the same requests.
    pub struct Pool {
        /// A label of metrics and a response header. Unique.
        pub name: String = required("name the pool, such as \"short\"").check(check_name).example("default");
        /// Names or aliases of models; "*": all declared models, and those that the backends
        /// report.
        pub models: ModelScope = default("[\"*\"]").at_most(limits::MAX_MODELS + limits::MAX_ALIASES);
        /// How a backend with room is picked. least_work predicts where the first token comes
        /// soonest and other requests are delayed least. It follows, for each engine, the prompt
        /// tokens before their first token, the sequences that decode and the tokens outstanding,
        /// and learns from streams how fast the engine is beside the others and how long short
        /// prompts wait there while a long one is in prefill. Short prompts (below 1,024 tokens)
        /// stay away from an engine in a long prefill for as long as that costs more than the other
        /// choice, and from each other; long ones go where the last long one is longest ago. A
        /// prompt whose beginning went to an engine before is expected to be in that engine's
        /// prefix cache, so a conversation stays where it is unless the wait there is longer than
        /// to compute it again. Equal engines get work in turn, unequal ones by their speed. What
        /// was learned is forgotten with the engine, or after a minute without observations. There
        /// is nothing to set. For comparison: fewest_requests (in flight; nginx's least_conn),
        /// two_choices (the one of two random ones with fewer in flight; nginx's random two
        /// least_conn), round_robin. All respect `weight`. prefix_affinity is least_work, with a
        /// warning.
        pub policy: Policy = default("least_work");
        /// Sequences in flight per backend: a request takes its prompts or inputs times n, and gets
        /// 400 when that is more than this. Lower it when the engine's own queue grows.
        pub slots: u32 = default("256").within("1", "65536");
        /// Outstanding prompt and output tokens per backend, such as the size of its KV cache. A
        /// request that demands more than this by itself (prompt and min_tokens) gets 400.
        pub tokens: Option<Tokens> = optional("not limited").within("1", limits::TOKENS).example("400k");
        /// Prompt tokens per backend of requests that still wait for their first token. A prompt
        /// above this runs when no other is in prefill.
        pub prefill_tokens: Option<Tokens> = optional("not limited").within("1", limits::TOKENS).example("16k");
        /// Requests come here only where an arm of an experiment names this pool. Its prompt_tokens
        /// then do not count, and it does not make its models available.
        pub arms_only: bool = default("false");
        /// Pools where a request may go when this one has no room, in order of preference. They
        /// must serve its models.
        pub spill: Vec<PoolId> = default("[]").at_most(limits::MAX_POOLS);
        /// Usage requested from the engine for streams: one event at the end, in every event (exact
        /// tokens per event, but every event is edited), or none. What the client did not request
        /// is removed again.
        pub usage: UsageInjection = default("final");
        /// How the engines order the requests that they have, as their flag --scheduling-policy
        /// says: "fcfs" or "priority". With priority they get the priority of each request; others
        /// get none. Engines that the gateway starts need no setting: it reads their flags.
        pub scheduling_policy: Option<SchedulingPolicy> =
            optional("as the flags of engines that the gateway starts say; fcfs for others").example("priority");
        /// Prompt lengths (estimated) that this pool is home to. For each model the ranges of its
        /// pools must cover every length exactly once.
        pub prompt_tokens: PromptRange = table();
        /// Bound on long prompts in prefill at once on a backend, home or spilled, so that short
        /// prompts keep moving. The permit returns at the first token.
        pub long_prefix: Option<LongPrefix> = optional("no bound");
        /// Where requests wait for room.
        pub queue: Queue = table();
        /// Objectives where they differ from [slo].
        pub slo: Slo = table();
        /// TLS to the backends of this pool that have an https url, where they have no such table
        /// of their own.
        pub tls: Option<UpstreamTls> = optional("the CAs that this machine trusts, and no own certificate");
        /// Backends that are pods of a Kubernetes cluster, instead of tables `backend`. Pods come
        /// and go while the gateway runs. It reaches the API server as its service account, or as
        /// KUBECONFIG says.
        pub kubernetes: Option<Pods> = optional("backends are listed");
        /// How many engines the pool should have.
        pub autoscale: Option<Autoscale> = optional("not computed");
        /// One table per vLLM server.
        pub backends as "backend": Vec<Backend> = tables(limits::MAX_BACKENDS).in_force();
    }
}

table! {
    /// Prompt lengths, half open: `min <= tokens < max`.
    #[derive(Copy, Eq)]
    pub struct PromptRange {
        /// The smallest length that is included.
        pub min: Tokens = default("0").within("0", limits::TOKENS);
        /// The smallest length that is no longer included.
        pub max: Option<Tokens> = optional("without end").within("1", limits::TOKENS).example("5k");
    }
}

impl PromptRange {
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
    /// Bound on prompts longer than `threshold` that are in prefill at once on one backend, home or
    /// spilled. The permit returns at the first token.
    #[derive(Copy, Eq)]
    pub struct LongPrefix {
        /// Prompts of more than this many tokens need a permit.
        pub threshold: Tokens =
            required("write the prompt length from which a permit is needed").within("1", limits::TOKENS).example("5k");
        /// Permits per backend. 0: such prompts never run here.
        pub slots: u32 = required("write how many such prompts may be in prefill at once on a backend").example("1");
    }
}

table! {
    /// Where requests wait for room.
    pub struct Queue {
        /// Waiting requests; 503 beyond. 0: none waits.
        pub length: usize = default("512").within("0", "100000");
        /// Longest wait; 503 after it.
        pub timeout: Duration = duration("20s");
        /// The owner that is next among waiting requests of one priority: the one that has used the
        /// engines least, in seconds of engine time divided by weight. "key": the API key
        /// (auth.keys.weight); "user": the end user that the body names (`user` or
        /// `safety_identifier`), where the users of a key divide the key's weight; { header =
        /// "x-tenant" }: the value of a header, which a trusted proxy should set; "off": all
        /// requests have one queue. `order` then holds among the requests of one owner. No engine
        /// stays idle for fairness, with one exception: while other owners are present, the prompts
        /// of an owner use at most its share of prefill.
        pub fair: Option<Fair> = optional("key if auth.keys are configured, otherwise off").example("\"key\"");
        /// Which request is next. The priority of the request comes first. In any order a request
        /// is overtaken by at most `length`
        /// later ones, and only by those that arrive in the first quarter of `timeout` after it.
        pub order: Order = default("shortest_first");
        /// shortest_first orders by arrival plus this for each 1,000 prompt tokens: short prompts
        /// go first, but a long one is overtaken for this time only, and never longer than a
        /// quarter of `timeout`. 0s: like fifo.
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
        /// Another word for least_work, which follows prefixes.
        PrefixAffinity = "prefix_affinity",
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

/// Pools by name, without repetition and without the pool itself.
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
