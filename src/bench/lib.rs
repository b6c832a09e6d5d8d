//! The load generator: sends requests on a schedule and measures what a client sees.
//!
//! The claims of this project are about tail latencies, and those depend on the clock that measures them. So the load
//! generator is an independent checker: it shares no code with the gateway's request path, reads the bytes of responses
//! itself, and fixes when each request is due before the run begins. Its own lag is part of the result, and so is the load
//! that it really delivered.
//!
//! | folder | question |
//! |---|---|
//! | `load` | what is sent, and when: workload, prompts, data sets, conversations, arrivals |
//! | `client` | how one request is sent, and how its response is measured |
//! | `run` | all requests of a run, its progress, the metrics of the servers meanwhile |
//! | `result` | the records of a run, their statistics, the files on disk |
//! | `report` | tables, HTML pages with plots, the knee of a sweep, comparisons |
//! | `search` | the highest rate at which the objectives hold |
//!
//! Definitions are those of `vllm bench serve`, with two stricter exceptions: an error inside a stream, and a stream that
//! stops before its end, are failures and not short successes.
//!
//! All randomness follows from one seed: two runs of the same plan send the same bytes at the same times. There is no
//! TLS and no HTTP/2.

pub mod error;
mod seed;
pub mod result;
pub mod load;
pub mod client;
pub mod run;
pub mod report;
pub mod search;

pub use client::failure::RequestFailure;
pub use client::load_client::{LoadClient, Timing};
#[cfg(any(test, feature = "testing"))]
pub use client::mock;
pub use error::BenchError;
pub use load::adapters::{AdapterChoice, Adapters};
pub use load::arrival::{Arrival, Extent, MAX_SECONDS};
pub use load::body::{Api, BodyFields, PromptTokens};
pub use load::length::Length;
pub use load::session::Sessions;
pub use load::workload::{Class, Prefix, PrefixKind, RequestSource, Workload};
pub use result::metrics::{Distribution, Metrics};
pub use result::record::{Outcome, Record, RunConfig, RunResult, Slo};
pub use run::plan::RunPlan;
pub use run::progress::Progress;
pub use run::runner::run;
