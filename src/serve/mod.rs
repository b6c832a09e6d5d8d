//! Composition: builds a running gateway from a configuration.
//!
//! [`start`] returns a [`Running`] gateway, which reloads and stops in order. A process may run several: the demo and the
//! tests do.
//!
//! Engines that the gateway runs start while it already serves: requests wait for them as the queue allows.
//!
//! Stopping: `/ready` returns 503, new requests are shed, and the client socket closes. Running and waiting requests have
//! `server.drain_timeout` to end. Then the engines stop (`fleet.on_exit`). The admin socket closes last.

mod app;
mod control;
mod certificates;
mod engines;
mod experiments;
mod local;
mod reload;
mod start;

pub use app::{App, Source, StartError};
pub use local::ModelList;
pub use reload::ReloadError;
pub use start::{Running, start};
