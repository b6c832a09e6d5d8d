//! Wall-clock time, for timestamps in responses and metrics.
//!
//! Nothing is scheduled by it: steps run on the monotonic clock of the engine loop. A clock before 1970 reads as 0.

use std::time::{SystemTime, UNIX_EPOCH};

/// Whole seconds since 1970, for `created`.
pub(crate) fn unix_time() -> u64 {
    unix_seconds() as u64
}

/// Seconds since 1970 with their fraction.
pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
