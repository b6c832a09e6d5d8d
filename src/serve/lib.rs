//! Composition: builds a running gateway from a configuration.
//!
//! [`start`] returns a [`Running`] gateway, which can reload and stop in order. One process may run
//! several, as the demo and the tests do. While the engines start, requests wait in the queue of
//! their pool.
//!
//! A stop: `/ready` returns 503, new requests are shed, and the client socket closes. Running and
//! waiting requests have `server.drain_timeout` to end. Then the engines stop (`fleet.on_exit`).
//! The admin socket closes last.
//!
//! An [`upgrade`] replaces the process without a stop: the sockets and the engines go to the next
//! process (`hand_over.rs`).
//!
//! `core` has the parts that all services share; `app.rs` builds the services. `leading.rs` starts
//! the services of the one gateway that leads, `start.rs` the others.

mod saved_file;
mod certificates;
mod engines;
mod sockets;
pub mod systemd;
pub mod upgrade;
mod cluster;
mod core;
pub mod checks;
mod tuner;
mod pods;
mod scaler;
mod turns;
mod experiments;
mod findings;
mod reload;
mod local;
mod app;
mod control;
mod leading;
mod running;
mod hand_over;
mod start;

pub use self::core::{Core, Source, StartError};
pub use app::App;
pub use local::ModelList;
pub use reload::{ReloadError, Reloader};
pub use running::Running;
pub use sockets::Sockets;
pub use start::{start, start_with};
