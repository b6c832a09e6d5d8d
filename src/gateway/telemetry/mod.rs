//! What the operator sees: metrics, the access log, the gateway's own log.
//!
//! [`families`] every metric in one table · [`collect`] records into metrics, pages out of them · [`recent`] the
//! last minute, for the live page · [`access_log`] one JSON line per sampled request · [`log`] tracing set up.
//!
//! The path of a request hands over one finished record and waits for nothing: recording costs about a microsecond,
//! takes no lock that is held across I/O, and when the access log cannot keep up, lines are dropped and
//! counted. What admission already knows (in flight, queues, states) is not counted a second time: it is read
//! at scrape time, so it cannot drift and a removed backend is gone with the next scrape.

pub mod access_log;
pub mod collect;
pub mod families;
pub mod log;
pub mod recent;

mod buckets;
mod gauges;
mod line;
mod process;
mod series;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use access_log::{AccessLogError, AccessLogWriter};
pub use collect::{Pools, Telemetry};
pub use recent::{MinuteStats, Quantiles};
