//! The configuration: what the operator asked for, checked, in the form the gateway works with.
//!
//! Two steps, never mixed. `file.rs` holds a document as it was written, each value with the place it
//! came from. `validate/` turns it into [`Config`], which is valid by construction: names have become
//! dense ids, references to secrets have been read, ranges cover every prompt length exactly once.
//! Nobody after that checks anything again, and nothing else in the crate knows TOML or defaults.
//!
//! - every problem is reported at once, with key path, line and a suggestion;
//! - every default lives in [`defaults`], with its unit and reason;
//! - every value knows its origin, so that `sluice check` can say who decided it;
//! - a reload is the difference between two of these.
//!
//! Order is meaning: `models[i]` is `ModelId(i)`, `pools[i]` is `PoolId(i)`, and backends are numbered
//! through over all pools ([`Config::backends`]). Ids belong to one `Config`; after a reload the same
//! name may have another id.
//!
//! Not here: starting anything, asking a backend which models it has, watching the file.

pub mod defaults;
pub mod diff;

mod auth;
mod choice;
mod file;
mod fleet;
mod load;
mod origin;
mod pool;
mod problem;
mod render;
mod secret;
mod server;
mod set;
mod suggest;
mod validate;

#[cfg(test)]
mod tests;

pub use auth::{Auth, Key, KeyLimit};
pub use choice::Choice;
pub use fleet::{Fleet, OnExit, OnStart};
pub use load::{Flags, Loaded};
pub use origin::{Origin, Origins};
pub use pool::{
    ArgValue, Backend, Control, Endpoint, Launch, LongPrefix, ModelScope, Order, Policy, Pool, PromptRange, Queue,
    Target, UsageInjection,
};
pub use problem::{Problem, Problems, Situation};
pub use render::Resolved;
pub use secret::{KeyDigest, MASK, Secret};
pub use server::{AccessLog, FirstByte, Health, Log, LogFormat, LogLevel, LogTarget, Retry, Server, Slo, Timeouts};
pub use suggest::Suggestion;
pub use validate::Surroundings;

use std::path::PathBuf;

use sluice_core::base::{BackendId, ModelId, PoolId, Tokens};

/// A valid configuration. Built by [`Config::load`], [`Config::parse`] or [`Config::from_flags`] only.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Sockets, threads and limits of the client side.
    pub server: Server,
    /// How long each stage of a request may take.
    pub timeouts: Timeouts,
    /// How often a request may be tried.
    pub retry: Retry,
    /// Who may use the gateway. Without keys it is open.
    pub auth: Auth,
    /// Model names that clients may send; the position is the [`ModelId`]. May be empty: pools that
    /// serve [`ModelScope::All`] then serve whatever their backends report.
    pub models: Vec<Model>,
    /// Pools, at least one; the position is the [`PoolId`]. For every model their ranges cover each
    /// prompt length exactly once.
    pub pools: Vec<Pool>,
    /// The objectives that pools without their own use.
    pub slo: Slo,
    /// How backends leave and re-enter rotation.
    pub health: Health,
    /// How engines that we run are looked after.
    pub fleet: Fleet,
    /// Where one line per request goes; `None`: nowhere.
    pub access_log: Option<AccessLog>,
    /// The gateway's own log, on stderr.
    pub log: Log,
}

/// A model name that clients may send. LoRA adapters are models too.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The name as backends know it; this goes upstream.
    pub name: String,
    /// Other names that clients may send for it. Unique over all models and their names.
    pub aliases: Vec<String>,
    /// A `tokenizer.json` for exact counts where a count can change a decision; `None`: learned ratio only.
    pub tokenizer: Option<PathBuf>,
    /// Prompt tokens assumed for each media part (image, audio, video) of a request.
    pub media_part_tokens: Tokens,
    /// It is a LoRA adapter, in this folder: engines that we run and whose pool serves it load it and keep it.
    pub adapter: Option<PathBuf>,
    /// Prompts whose greedy answers must be the same before and after a restart of an engine that we run.
    pub golden: Vec<String>,
}

impl Config {
    /// The model that `name` means, be it a name or an alias. `None`: not declared, which pools that
    /// serve [`ModelScope::All`] may still accept. Linear; build a map for the path of a request.
    pub fn model_named(&self, name: &str) -> Option<ModelId> {
        let means = |model: &Model| model.name == name || model.aliases.iter().any(|alias| alias == name);
        self.models.iter().position(means).map(ModelId::new)
    }

    /// The pool called `name`.
    pub fn pool_named(&self, name: &str) -> Option<PoolId> {
        self.pools.iter().position(|pool| pool.name == name).map(PoolId::new)
    }

    /// All backends with their dense ids, pool by pool in the order of the configuration.
    pub fn backends(&self) -> impl Iterator<Item = (PoolId, BackendId, &Backend)> {
        self.pools
            .iter()
            .enumerate()
            .flat_map(|(index, pool)| pool.backends.iter().map(move |backend| (PoolId::new(index), backend)))
            .enumerate()
            .map(|(number, (pool, backend))| (pool, BackendId::new(number), backend))
    }
}
