//! A virtual server on the real clock: the task that owns the server, and the state that this task
//! shares with the HTTP side.
//!
//! Commands enter through an inbox, and tokens leave through one collector per request. The
//! concurrency limit bounds both.

pub(crate) mod command;
pub(crate) mod concurrency_limit;
pub(crate) mod engine_loop;
pub mod output_collector;
pub(crate) mod state;
