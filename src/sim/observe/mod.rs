//! The simulator as an operator sees it: vLLM's log lines and its metrics page.
//!
//! `stats` and `http_metrics` hold the numbers; `metrics_page` writes them under the names of a
//! version of vLLM.

pub(crate) mod http_metrics;
pub(crate) mod kv_events;
pub mod log;
pub(crate) mod metrics_page;
pub(crate) mod stats;
