//! One run: send the scheduled requests, wait for their responses, collect the records.
//!
//! `plan` says what to send, `runner` drives a run from its plan to its result, `sender` sends one request and
//! `conversation` several in turn. `progress` counts meanwhile, `scrape` samples the metrics of the servers, and `lag`
//! measures how late this process itself is. Bounds: at most [`MAX_REQUESTS`](crate::load::arrival::MAX_REQUESTS)
//! requests a run.

pub mod plan;
pub mod progress;
pub mod lag;
pub mod scrape;
mod sender;
mod conversation;
pub mod runner;
