//! The laboratory: the gateway's request path against simulated engines on virtual time, in one process.
//!
//! ```text
//! agenda (arrivals, turns, changes) ──▶ client ──▶ sluice_gateway::flow ──▶ upstream ──▶ cluster: sluice_sim::VirtualServer
//!                                         ▲        estimate, admission,                   of each backend
//!                                         └─────── pump, meter ◀── events as they become visible ──┘
//! ```
//!
//! The code that decides is the gateway's own: configuration, estimates, pools, retries and meters are those of
//! `sluice serve`. Requests are those of `sluice bench`, byte for byte, and so are the results. Engines are those of
//! `sluice sim`. Not part of it: sockets, HTTP parsing, TLS, API keys, exact token counts, probes over the network,
//! the gateway's own CPU time; of vLLM, limits on waiting requests and the `priority` of a request; responses that are not
//! streamed.
//!
//! [`run`] is a discrete-event simulation: the clock is tokio's, paused, and jumps from event to event, so that times are
//! exact to the nanosecond whatever the resolution of timers. All randomness follows from one seed: the same setup gives
//! byte-identical records.

pub mod error;
pub mod setup;
mod content;
mod outlet;
mod engine;
mod cluster;
mod upstream;
mod client;
mod agenda;
pub mod run;
pub mod measure;
pub mod file;
mod traffic;
pub mod scenario;
pub mod sweep;
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
pub use setup::{EngineChange, EngineSetup, Lab};
pub use study::{Options, Study};
