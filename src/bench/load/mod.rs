//! What is sent, and when: the workload, and the schedule of its requests.
//!
//! `workload` draws the requests: classes, lengths (`length`), prompts and bodies (`body`), adapters, or the items of a
//! `dataset`. `session` and
//! `conversation` chain requests into conversations. `arrival` decides when each request is due. Everything
//! random follows from the seed of the run. Dataset files are read here; there is no other I/O.

pub mod length;
pub mod body;
pub mod arrival;
pub mod adapters;
pub mod dataset;
pub mod workload;
pub mod session;
pub mod conversation;
