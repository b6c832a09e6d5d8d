//! The load generator: sends requests on a schedule and measures the latencies that a client sees.
//!
//! It shares no code with the gateway's request path, and fixes the due time of each request before
//! the run. The result includes the load that was really delivered, and the lag of the load
//! generator.
//!
//! | folder | content |
//! |---|---|
//! | `load` | requests and due times: workload, datasets, conversations, arrivals |
//! | `client` | sends one request and measures the response |
//! | `run` | executes a whole run, with progress and metrics of the servers |
//! | `result` | records of a run, statistics, files on disk |
//! | `report` | tables, HTML pages with plots, the knee of a sweep, comparisons |
//! | `records` | reports on one day of the gateway's request records |
//! | `search` | the highest rate at which the objectives hold |
//!
//! Definitions follow `vllm bench serve`, except that a response stream that has an error or is cut
//! off counts as a failure. All randomness follows from one seed: two runs of the same plan send
//! the same bytes at the same due times. HTTP/2 is not supported.

pub mod error;
mod seed;
pub mod result;
pub mod load;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod client;
pub mod run;
pub mod report;
pub mod records;
pub mod search;

pub use client::failure::RequestFailure;
pub use client::load_client::{LoadClient, Timing};
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
