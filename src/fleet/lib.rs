//! Engines as processes: are they up, what do they serve, do they move; and those that we run ourselves.
//!
//! [`probe`](Prober) asks every engine: `/health`, `/v1/models`, and, when an engine that has work has gone silent, its
//! counters. [`driver`] is the seam to what starts and stops engines; the life cycle of an engine
//! says what follows what, the [`coordinator`] carries it out and writes each step to the [`journal`](Journal) first. This is the only place that spawns an engine.

pub mod coordinator;
pub mod driver;
mod engine;
mod http;
mod launch;
pub mod ports;
mod probe;
mod ready;

pub use coordinator::{
    ChangeStarted, EngineSpec, EngineView, ExternalBackend, Fleet, LastChange, RestartError, RestartRequest, unattended,
};
pub use driver::{CommandDriver, ExternalDriver, ProcessDriver};
pub use engine::journal::{Journal, JournalError, Record, Setup};
pub use http::{FetchError, fetch, post};
pub use launch::adapter_rank;
pub use ports::PortsError;
pub use probe::{Prober, ReportedModels};
pub use ready::{Ready, ReadyRules, wait_until_ready};
