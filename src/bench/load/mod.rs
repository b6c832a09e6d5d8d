//! The requests of a run and their due times.
//!
//! `workload` draws the requests, or takes the items of a `dataset`. `session` and `conversation`
//! make conversations of them. `arrival` decides the due times. The only I/O is the reading of
//! dataset files.

pub mod length;
pub mod text;
pub mod body;
pub mod arrival;
pub mod adapters;
pub mod dataset;
pub mod workload;
pub mod session;
pub mod conversation;
