//! The wall clock, for timestamps in responses and metrics.
//!
//! Apart from timestamps, only log lines read it. The engine runs on virtual time, and the server
//! measures with monotonic clocks.

use std::time::{SystemTime, UNIX_EPOCH};

/// Whole seconds since 1970, for `created`.
pub(crate) fn unix_time() -> u64 {
    unix_seconds() as u64
}

pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
