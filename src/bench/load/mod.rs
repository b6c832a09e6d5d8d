//! What is sent, and when: the workload, and the schedule of its requests.
//!
//! `workload` draws the requests: classes, lengths (`length`), prompts and bodies (`text`, `body`), adapters, or the items of a
//! `dataset`. `session` and `conversation` chain requests into conversations. `arrival` decides when each request is due. All
//! randomness follows from the seed of the run. The only I/O is reading dataset files.

pub mod length;
pub mod text;
pub mod body;
pub mod arrival;
pub mod adapters;
pub mod dataset;
pub mod workload;
pub mod session;
pub mod conversation;
