//! One run: send the scheduled requests, wait for their responses, collect the records.
//!
//! `runner` turns a `plan` into a result. `sender` sends one request, `conversation` the turns of a
//! conversation. `progress` counts requests, `scrape` samples the metrics of the servers, and `lag`
//! measures how late this process is. `counts` compares requested and counted tokens. `profile`
//! controls the servers' profilers. Bounds: at most
//! [`MAX_REQUESTS`](crate::load::arrival::MAX_REQUESTS) requests.

pub mod plan;
pub mod progress;
pub mod lag;
pub mod profile;
pub mod scrape;
mod counts;
mod sender;
mod conversation;
pub mod runner;
