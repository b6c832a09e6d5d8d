//! One run: send the scheduled requests, wait for their responses, collect the records.
//!
//! `runner` turns a `plan` into a result: `sender` sends one request, `conversation` the turns of a
//! conversation. `scrape` samples the metrics of the servers, and `lag` measures how late this
//! process is. Bounds: [`MAX_REQUESTS`](crate::load::arrival::MAX_REQUESTS).

pub mod plan;
pub mod progress;
pub mod lag;
pub mod profile;
pub mod scrape;
mod counts;
mod sender;
mod conversation;
pub mod runner;
