//! What a gateway has seen of the load of a pool, for the one that decides how many engines the pool needs.
//!
//! What has ended is summed up since the gateway started, so that a renewal that fails loses nothing. What it counts is the matter
//! of the scaler.

use serde::{Deserialize, Serialize};

/// One gateway's load of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolLoad {
    /// Requests that wait in its queue.
    pub queue: u64,
    /// Sequences in flight.
    pub in_flight: u64,
    /// Sums over the requests that have ended since it started, of what the scaler counts.
    pub ended: [f64; 6],
}
