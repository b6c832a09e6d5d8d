//! Composition: builds a running gateway from a configuration.
//!
//! [`start`] returns a [`Running`] gateway, which can reload and stop in order. One process may run
//! several gateways, as the demo and the tests do. The gateway serves while it starts the engines:
//! requests wait in the queue of their pool.
//!
//! A stop: `/ready` returns 503, new requests are shed, and the client socket closes. Running and
//! waiting requests have `server.drain_timeout` to end. Then the engines stop (`fleet.on_exit`).
//! The admin socket closes last.
//!
//! An [`upgrade`] replaces the process without a stop: the sockets and the engines go to the next
//! process.

mod tuning;
mod cluster;
mod scaling;
mod reloads;
mod app;
mod control;
mod certificates;
mod engines;
pub mod checks;
mod pods;
mod experiments;
mod local;
mod reload;
mod saved_experiments;
mod added_experiments;
mod engine_tuning;
mod tuner;
#[cfg(feature = "kubernetes")]
mod replicas;
mod findings;
mod scaler;
mod sockets;
pub mod upgrade;
pub mod systemd;
mod leading;
mod running;
#[cfg(feature = "kubernetes")]
mod find_pods;
mod start;

pub use app::{App, Source, StartError};
pub use local::ModelList;
pub use reload::ReloadError;
pub use running::Running;
pub use sockets::Sockets;
pub use start::{start, start_with};
