//! One engine that the gateway runs: its life cycle, and the task that carries it out.
//!
//! [`lifecycle`] decides what follows what, without clock and without I/O. [`effects`] does what each step is there for.
//! [`engine_task`] joins both and writes each step to the [`journal`] before it begins. What concerns several engines is the
//! coordinator's.

pub(crate) mod adapters;
pub(crate) mod checks;
mod client;
pub(crate) mod context;
mod effects;
mod history;
pub(crate) mod engine_task;
pub(crate) mod journal;
pub(crate) mod lifecycle;
pub(crate) mod preflight;
mod recover;
pub(crate) mod spec;
pub(crate) mod view;
