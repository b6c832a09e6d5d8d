//! The load generator: sends requests on a schedule and measures what a client sees.
//!
//! It exists because the product's claims are about tails, and a tail is only as honest as the
//! clock that measured it. So it is a witness: it shares no code with the gateway's request path,
//! reads the bytes of the answers itself, and decides when a request *should* have been sent before
//! the run begins. What is late by our own fault is in the result, and so is the load that was really delivered.
//!
//! | folder | question |
//! |---|---|
//! | `load` | what is sent, and when: workload, prompts, data sets, conversations, arrivals |
//! | `client` | how one request is sent, and what its response says and when |
//! | `run` | all requests of a run, its progress, the metrics of the servers meanwhile |
//! | `result` | the records of a run, their statistics, the files on disk |
//! | `report` | tables, HTML pages with plots, the knee of a sweep, comparisons |
//! | `search` | the highest rate at which the objectives hold |
//!
//! Definitions are those of `vllm bench serve`, with two differences, both on the side of truth: an
//! error inside a stream and a stream that stops before its end are failures, not short successes.
//!
//! Everything random follows from one seed, so two runs with the same plan send the same bytes at
//! the same times. Not here: TLS, HTTP/2.

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
