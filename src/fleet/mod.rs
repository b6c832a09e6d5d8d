//! Engines as processes: are they up, what do they serve, do they move; and those that we run ourselves.
//!
//! [`probe`](Prober) asks every engine: `/health`, `/v1/models`, and, when an engine that has work has gone silent, its
//! counters. [`driver`] is the seam to what starts and stops engines. This is the only place that spawns one.

mod command;
pub mod driver;
mod external;
mod http;
mod launch;
mod probe;
mod process;
mod ready;

pub use command::{CommandDriver, Commands};
pub use external::ExternalDriver;
pub use http::{FetchError, fetch};
pub use launch::adapter_rank;
pub use probe::{Prober, Reported};
pub use process::ProcessDriver;
pub use ready::{Ready, ReadyRules, until_ready};
