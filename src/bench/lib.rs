//! The load generator: sends requests on a schedule and measures what a client sees.
//!
//! It is an independent check of the gateway: it shares no code with the gateway's request path, parses responses itself,
//! and decides before the run when each request is due. The result includes the load that was really delivered and how
//! late the load generator itself was.
//!
//! | folder | question |
//! |---|---|
//! | `load` | what is sent, and when: workload, prompts, datasets, conversations, arrivals |
//! | `client` | how one request is sent, and how its response is measured |
//! | `run` | how a whole run is executed: requests, progress, metrics of the servers |
//! | `result` | the records of a run, their statistics, the files on disk |
//! | `report` | tables, HTML pages with plots, the knee of a sweep, comparisons |
//! | `records` | what a day of the gateway's own records shows |
//! | `search` | the highest rate at which the objectives hold |
//!
//! Definitions are those of `vllm bench serve`, with two exceptions: a response stream with an error in it, and one that
//! is cut off, count as failures.
//!
//! All randomness follows from one seed: two runs of the same plan send the same bytes at the same due times. HTTP/2 is not
//! supported.

pub mod error;
mod seed;
pub mod result;
pub mod load;
pub mod client;
pub mod run;
pub mod report;
pub mod records;
pub mod search;

pub use client::failure::RequestFailure;
pub use client::load_client::{LoadClient, Timing};
#[cfg(any(test, feature = "testing"))]
pub use client::mock;
pub use client::tls::Trust;
pub use error::BenchError;
pub use load::adapters::{AdapterChoice, Adapters};
pub use load::arrival::{Arrival, Extent, MAX_SECONDS};
pub use load::body::{Api, BodyFields, PromptTokens};
pub use load::length::Length;
pub use load::session::Sessions;
pub use load::text::ExactText;
pub use load::workload::{Class, Prefix, PrefixKind, RequestSource, Workload};
pub use result::metrics::{Distribution, Metrics};
pub use result::record::{Outcome, Record, RunConfig, RunResult, Slo};
pub use run::plan::RunPlan;
pub use run::progress::Progress;
pub use run::runner::run;
pub use seed::nth_seed;
