//! One run: send the scheduled requests, wait for their responses, collect the records.
//!
//! `runner` drives a run from its plan to its result. `progress` counts while it lasts, `scrape` samples the metrics of the
//! servers, and `lag` measures how late this process itself is. Bounds: a run holds at most
//! [`MAX_REQUESTS`](crate::load::arrival::MAX_REQUESTS) requests.

pub mod progress;
pub mod lag;
pub mod scrape;
pub mod runner;
