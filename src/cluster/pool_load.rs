//! A gateway's load of a pool. The gateway that decides the number of engines reads it.
//!
//! The sums over ended requests begin at the start of the gateway, so a failed renewal loses no
//! request.

use serde::{Deserialize, Serialize};

/// One gateway's load of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolLoad {
    /// Requests that wait in the queue.
    pub queue: u64,
    /// Sequences in flight.
    pub in_flight: u64,
    /// Sums over ended requests, as the scaler defines them.
    pub ended: [f64; 6],
}
