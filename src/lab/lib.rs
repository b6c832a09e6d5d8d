//! `sluice lab`: a discrete-event simulation of the gateway's request path in front of simulated
//! engines, in one process.
//!
//! ```text
//! event queue ─▶ client ─▶ sluice_gateway::flow ─▶ upstream ─▶ cluster: one
//! (arrivals,       ▲       estimate, admission,                sluice_sim::VirtualServer
//! turns, changes)  └────── pump, meter ◀───────── tokens ───── for each backend
//! ```
//!
//! The gateway is not a model: configuration, estimates, pools, retries and meters are the code of
//! `sluice serve`. Requests and result files are byte for byte as in `sluice bench`, engines as in
//! `sluice sim`.
//!
//! Not simulated: sockets, HTTP parsing, TLS, API keys, exact token counts, the gateway's CPU time,
//! responses that are not streamed, and vLLM's limits on waiting requests and `priority` of a
//! request.
//!
//! The clock of a [`run`] is tokio's paused clock. It jumps from event to event, so times are exact
//! to the nanosecond. All randomness follows from one seed: the same setup and seed give
//! byte-identical records.

pub mod error;
pub mod autoscale_rules;
pub mod setup;
mod content;
mod engine;
mod cluster;
mod upstream;
mod client;
mod job;
mod event_queue;
mod tuning;
mod autoscale;
mod findings;
pub mod classes;
pub mod run;
pub mod forecast;
pub mod measure;
pub mod file;
mod traffic;
pub mod scenario;
pub mod sweep;
mod parallel;
pub mod study;
pub mod table;
pub mod expect;
pub mod prices;
pub mod plan;
pub mod rate;
#[cfg(test)]
mod tests;

pub use engine::EngineStats;
pub use error::LabError;
pub use file::{LabFile, Variant};
pub use measure::Measure;
pub use run::{LabRun, run};
pub use scenario::Scenario;
pub use setup::{EngineChange, EngineSetup, Forecaster, Lab, Plant, PlantedFault};
pub use study::{Options, Study};
