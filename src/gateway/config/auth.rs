//! `[auth]`: who may send requests, for which models, how many.
//!
//! A key itself is never in the configuration: only its SHA-256, so that a leaked file opens nothing. Without keys the
//! gateway is open, and a warning says so unless only this machine reaches it. Names of keys are for logs; they are unique.

use super::limits;
use super::model::ModelScope;
use super::secret::{KeyDigest, Secret};
use super::table::table;
use super::value::check_name;
use sluice_core::base::Tokens;

table! {
    /// Who may use the gateway.
    pub struct Auth {
        /// Bearer token of the admin API: "env:NAME" or "file:PATH". Needed when `server.admin` is not on loopback. Without one,
        /// every user of this machine may change the gateway; web pages may not.
        pub admin_token: Option<Secret> = optional("none").example("env:SLUICE_ADMIN_TOKEN");
        /// One table per client key. Without any, every client that reaches `server.listen` may send requests.
        pub keys: Vec<Key> = tables(limits::MAX_KEYS);
    }
}

table! {
    /// One client key.
    pub struct Key {
        /// For logs and the admin API; never the key.
        pub name: String = required("name the key for logs").check(check_name).example("team-a");
        /// SHA-256 of the key, as 64 hex digits, "env:NAME" or "file:PATH". Make it with: printf %s "$KEY" | sha256sum
        pub sha256: KeyDigest =
            required("write 64 hex digits, or env:NAME or file:PATH").example("env:TEAM_A_KEY_SHA256");
        /// Models it may use: names or aliases, or "*" for all. 403 for others.
        pub models: ModelScope = default("[\"*\"]").at_most(limits::MAX_MODELS + limits::MAX_ALIASES);
        /// Lower is served earlier when requests wait, as in vLLM.
        pub priority: i32 = default("0");
        /// Its share of pools with fair queues (queue.fair), relative to the keys that want something at the same time.
        pub weight: f64 = default("1.0").within("0.001", "1000");
        /// What the key may use; 429 above it.
        pub limit: KeyLimit = table();
    }
}

table! {
    /// What one key may use; 429 above it. With [cluster]: at all gateways together.
    #[derive(Default)]
    pub struct KeyLimit {
        /// Requests at once, waiting ones included.
        pub in_flight: Option<u32> = optional("no limit").within("1", limits::COUNT).example("64");
        /// Requests per minute. At once, from idle, ten of them or those of ten seconds, whichever is more; never more than those
        /// of a minute. With [cluster], each gateway has at least one of the ten.
        pub requests_per_minute: Option<u32> = optional("no limit").within("1", limits::COUNT).example("600");
        /// Sequences at once, waiting ones included: prompts of a request times n; one where nothing is generated. A request
        /// above it by itself: 400.
        pub sequences: Option<u32> = optional("no limit").within("1", limits::COUNT).example("256");
        /// Prompt and expected output tokens at once, waiting requests included. A request above it by itself: 400.
        pub tokens: Option<Tokens> = optional("no limit").within("1", limits::TOKENS).example("400k");
        /// Prompt and expected output tokens per minute.
        pub tokens_per_minute: Option<Tokens> = optional("no limit").within("1", limits::TOKENS).example("2M");
    }
}
