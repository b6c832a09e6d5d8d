//! `[auth]`: who may send requests, for which models, and how many requests.
//!
//! The configuration has only the SHA-256 of a key, so a leaked file opens nothing. Without keys
//! the gateway is open, and a warning says so unless only this machine reaches it. Names of keys
//! are for logs; they are unique.

use super::continuation::Continue;
use super::limits;
use super::model::ModelScope;
use super::secret::{KeyDigest, Secret};
use super::table::table;
use super::value::check_name;
use sluice_core::base::Tokens;

table! {
    /// Who may use the gateway.
    pub struct Auth {
        /// Bearer token of the admin API: "env:NAME" or "file:PATH". Required if `server.admin` is
        /// not on loopback. Without a token, every user of this machine may change the gateway; web
        /// pages may not.
        pub admin_token: Option<Secret> = optional("none").example("env:SLUICE_ADMIN_TOKEN");
        /// One table per client key. Without keys, every client that reaches `server.listen` may
        /// send requests.
        pub keys: Vec<Key> = tables(limits::MAX_KEYS);
    }
}

table! {
    /// One client key.
    pub struct Key {
        /// Name of the key in logs and in the admin API, which never show the key.
        pub name: String = required("name the key for logs").check(check_name).example("team-a");
        /// SHA-256 of the key: 64 hex digits, "env:NAME" or "file:PATH". To compute it: printf %s
        /// "$KEY" | sha256sum
        pub sha256: KeyDigest =
            required("write 64 hex digits, or env:NAME or file:PATH").example("env:TEAM_A_KEY_SHA256");
        /// Models that the key may use: names or aliases, or "*" for all. Requests for other models
        /// of this gateway get 403.
        pub models: ModelScope = default("[\"*\"]").at_most(limits::MAX_MODELS + limits::MAX_ALIASES);
        /// The priority of a request that asks for none. A lower number is served earlier when
        /// requests wait, as in vLLM. Engines that schedule by priority get the number, too
        /// (`pool.scheduling_policy`).
        pub priority: i32 = default("0");
        /// The lowest number that a request may ask for, by `priority` in the body or by the header
        /// X-Vllm-Priority, which wins. A lower number counts as this one.
        pub priority_min: Option<i32> = optional("as priority").example("-10");
        /// The highest number that a request may ask for. A higher number counts as this one.
        pub priority_max: i32 = default("2147483647");
        /// The key's share of pools with fair queues (queue.fair), relative to the other keys that
        /// use a pool at the same time.
        pub weight: f64 = default("1.0").within("0.001", "1000");
        /// Whether streams of the key are continued on another engine.
        pub on_failure as "continue": Option<Continue> = optional("as retry.continue").example("\"off\"");
        /// Limits of the key. A request above one of them gets 429. With [cluster], all gateways
        /// together keep them.
        pub limit: KeyLimit = table();
    }
}

impl Key {
    /// The priorities of the key's requests.
    pub fn priorities(&self) -> PriorityRange {
        let (default, max) = (self.priority, self.priority_max);
        PriorityRange { default, min: self.priority_min.unwrap_or(default), max }
    }
}

/// The priorities that requests may have; lower is earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityRange {
    /// The priority of a request that asks for none.
    pub default: i32,
    /// The lowest number, which is served earliest.
    pub min: i32,
    /// The highest number, which is served latest.
    pub max: i32,
}

impl PriorityRange {
    /// Whether the three numbers are in order.
    pub(super) fn is_ordered(&self) -> bool {
        self.min <= self.default && self.default <= self.max
    }

    /// The priority of a request that asks for `asked`.
    pub fn of(&self, asked: Option<i64>) -> i32 {
        let Some(asked) = asked else { return self.default };
        // The result lies between two numbers of 32 bits.
        let (min, max) = (i64::from(self.min), i64::from(self.max));
        i32::try_from(asked.clamp(min, max.max(min))).unwrap_or(self.default)
    }
}

table! {
    /// Limits of one key. A request above one of them gets 429. With [cluster], all gateways
    /// together keep them.
    #[derive(Default)]
    pub struct KeyLimit {
        /// Requests at once, waiting requests included.
        pub in_flight: Option<u32> = optional("no limit").within("1", limits::COUNT).example("64");
        /// Requests per minute. After a pause, a key may send a burst: ten requests or the requests
        /// of ten seconds, whichever is more, but never more than the requests of a minute. With
        /// [cluster], each gateway allows a part of the ten, at least one.
        pub requests_per_minute: Option<u32> = optional("no limit").within("1", limits::COUNT).example("600");
        /// Sequences at once, waiting requests included: the prompts of a request times n, or one
        /// if the request generates nothing. A request that alone exceeds the limit gets 400.
        pub sequences: Option<u32> = optional("no limit").within("1", limits::COUNT).example("256");
        /// Prompt and expected output tokens at once, waiting requests included. A request that
        /// alone exceeds the limit gets 400.
        pub tokens: Option<Tokens> = optional("no limit").within("1", limits::TOKENS).example("400k");
        /// Prompt and output tokens per minute. A request is charged with the tokens that the
        /// gateway expects. When the request ends, the gateway corrects the charge to the tokens
        /// used: the key gets an excess back, and owes a shortfall, for an hour of the rate at
        /// most. While a key owes tokens, its requests get 429. A request without max_tokens is
        /// charged with at least a part of the limit until it ends.
        pub tokens_per_minute: Option<Tokens> = optional("no limit").within("1", limits::TOKENS).example("2M");
        /// Prompt and output tokens within the last 24 hours, charged in the same way. Used tokens
        /// become free again a day later, up to a quarter of an hour late. Reloads keep the count;
        /// a restart or an upgrade begins a new one.
        pub tokens_per_day: Option<Tokens> = optional("no limit").within("1", limits::TOKENS).example("500M");
    }
}
