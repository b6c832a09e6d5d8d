//! The requests of a run and their due times.
//!
//! `workload` draws the requests, or takes the items of a `dataset`. `session` and `conversation`
//! chain them. `arrival` decides the due times. Only reading dataset files is I/O.

pub mod length;
pub mod text;
pub mod body;
pub mod arrival;
pub mod adapters;
pub mod dataset;
pub mod workload;
pub mod session;
pub mod conversation;
