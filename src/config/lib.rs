//! The configuration: the operator's text, checked, in the form that the gateway works with.
//!
//! A table of the file is declared once, with `table!`: each key has documentation, type, default
//! and bounds in one place (`server.rs`, `pool.rs`, `backend.rs` and others; `root.rs` puts them
//! together). Reading, `sluice check`, the changes of a reload and the reference file come from
//! these definitions. **To add a key, add a field.**
//!
//! ```text
//!   file.rs  TOML with the line of every value  <- set.rs applies --set, added.rs adds experiments
//!      |     copies.rs and ranks.rs repeat backends
//!      |     key.rs, table.rs, setting.rs, value.rs read it by the definitions; report.rs collects
//!      |     every problem
//!   root.rs  Config    <- rules.rs, coverage.rs, experiment_rules.rs check rules of several keys
//!      |
//!   show.rs the resolved page    diff.rs changes of a reload    reference.rs config/sluice.toml
//! ```
//!
//! - Every problem is reported at once, with key path, line and a suggestion.
//! - Every value has an origin (default, line, `--set`, flag, admin API), which `sluice check`
//!   prints.
//! - A [`Config`] is valid by construction: names have become dense ids, secrets were read, ranges
//!   cover every prompt length exactly once. No other crate knows the file's TOML or defaults.
//!
//! `tls` turns certificates into settings of rustls; `owner` refuses files that other users may
//! change.
//! Not here: starting anything, asking a backend for its models, watching the file.

pub mod owner;
pub mod tls;
pub mod limits;

mod machine;
mod origin;
mod topic;
mod suggestion;
mod problem;
mod situation_topic;
mod file;
mod set;
mod added;
mod key;
mod report;
mod setting;
mod value;
mod table;
mod secret;
mod certificates;
mod cors;
mod proxies;
mod model;
mod continuation;
mod auth;
mod server;
mod traces;
mod records;
mod admin;
mod gpu;
mod backend;
mod address;
mod pods;
mod autoscale;
mod fair;
mod job;
mod token_limit;
mod pool_engine;
mod pool;
mod ranks;
mod events;
mod class;
mod fleet;
mod tuner;
mod cluster;
mod experiment;
mod root;
mod put_pods;
mod put_engines;
mod rules;
mod experiment_rules;
mod coverage;
mod copies;
mod load;
mod show;
mod reference;

pub mod diff;

#[cfg(test)]
mod tests;

pub use added::AddedExperiment;
pub use address::Address;
pub use admin::Admin;
pub use auth::{Auth, Key, KeyLimit, PriorityRange};
pub use autoscale::Autoscale;
pub use backend::{ArgValue, Backend, Control, Launch, PodEngine, Target, is_secret_arg};
pub use certificates::{PemFile, ServerTls, UpstreamTls, VerifyClient, VerifyEngine};
pub use class::{Class, OTHER_CLASS, attainment};
pub use cluster::{Cluster, ClusterLeader, ClusterMode, ClusterObject};
pub use continuation::{Continue, Drain};
pub use cors::Cors;
pub use experiment::{Arm, Experiment, Guardrail, RampStep, Shadow, Sticky, Traffic};
pub use fair::Fair;
pub use fleet::{Fleet, OnExit, OnStart, Rollback};
pub use gpu::Gpu;
pub use job::Cost;
pub use load::{Flags, Loaded};
pub use machine::{Machine, available_memory};
pub use model::{Model, ModelScope};
pub use origin::{Origin, Origins};
pub use pods::{FoundPod, Pods};
pub use pool::{LongPrefix, Order, Policy, Pool, PrefixMemory, PromptRange, Queue, SchedulingPolicy, UsageInjection};
pub use pool_engine::PoolEngine;
pub use problem::{Problem, Problems, Situation, Suggestion};
pub use proxies::AddressRange;
pub use ranks::engine_name;
pub use records::Records;
pub use reference::reference;
pub use report::Surroundings;
pub use root::Config;
pub use secret::{KeyDigest, MASK, Secret, Words};
pub use server::{
    AccessLog, DEFAULT_ADMIN, FirstByte, Health, Log, LogFormat, LogLevel, LogTarget, Retry, Server, Slo, Timeouts,
};
pub use show::Resolved;
pub use token_limit::TokenLimit;
pub use topic::Topic;
pub use traces::{METRICS_PATH, TRACES_PATH, Tracing};
pub use tuner::{DailyWindow, TUNER_FLAGS, Tuner, TunerMode, TunerSimulation};
pub use value::Endpoint;
