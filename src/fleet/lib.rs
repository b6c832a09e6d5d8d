//! Engines as processes: are they up, what do they serve, do they move; and those that we run ourselves.
//!
//! [`probe`](Prober) asks every engine: `/health`, `/v1/models`, and, when an engine that has work has gone silent, its
//! counters. [`driver`] is the seam to what starts and stops engines; [`life`] says what follows what, the [`supervisor`]
//! carries it out and writes each step to the [`journal`](Journal) first. This is the only place that spawns an engine.

pub mod driver;
mod http;
mod journal;
mod launch;
pub mod life;
pub mod ports;
mod probe;
mod ready;
pub mod supervisor;

pub use driver::{CommandDriver, ExternalDriver, ProcessDriver};
pub use http::{FetchError, fetch, post};
pub use journal::{Journal, JournalError, Record, Setup};
pub use launch::adapter_rank;
pub use ports::PortsError;
pub use probe::{Prober, ReportedModels};
pub use ready::{Ready, ReadyRules, wait_until_ready};
pub use supervisor::{Begun, CannotRestart, EngineSpec, EngineView, Fleet, Other, RestartAsk, unattended};
