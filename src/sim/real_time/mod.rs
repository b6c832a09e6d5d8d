//! Virtual servers on the real clock, one per data-parallel rank: the task that owns a server, and
//! the state that the tasks share with the HTTP side.
//!
//! Commands enter through an inbox, and tokens leave through one collector per request. The
//! concurrency limit bounds both.

pub(crate) mod command;
pub(crate) mod concurrency_limit;
pub(crate) mod engine_loop;
pub mod output_collector;
pub(crate) mod rank;
pub(crate) mod state;
