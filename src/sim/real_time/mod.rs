//! A virtual server on the real clock: the task that owns it, and the state that this task shares with the HTTP side.
//!
//! Commands go in through an inbox, tokens come out through one collector per request. The concurrency limit bounds both.

pub(crate) mod command;
pub(crate) mod concurrency_limit;
pub(crate) mod engine_loop;
pub(crate) mod output_collector;
pub(crate) mod state;
