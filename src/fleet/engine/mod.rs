//! One engine that the gateway runs: the life cycle, and the task that carries it out.
//!
//! [`lifecycle`] decides the order of steps, without clock and without I/O. [`effects`] performs
//! each step. [`engine_task`] joins both, and writes each step to the [`journal`] before it begins.
//! The coordinator handles whatever concerns several engines.

pub(crate) mod adapters;
pub(crate) mod checks;
mod client;
pub(crate) mod context;
pub(crate) mod effects;
mod history;
pub(crate) mod engine_task;
pub(crate) mod journal;
pub(crate) mod kept;
pub(crate) mod lifecycle;
pub(crate) mod preflight;
mod recover;
mod sleep_mode;
pub(crate) mod spec;
pub(crate) mod view;
