//! Engines as processes that somebody runs: are they up, what do they serve, do they move?
//!
//! Today every engine is run by somebody else, and this folder only asks: an active probe of `/health`,
//! the model list of `/v1/models`, and, when an engine that has work has gone silent, its counters.
//! Starting, draining and restarting engines belongs here too, and nowhere else: it is the only place
//! that will spawn a process.

mod http;
mod probe;

pub use http::{FetchError, fetch};
pub use probe::{Prober, Reported};
