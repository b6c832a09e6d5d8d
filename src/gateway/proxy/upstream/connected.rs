//! A connection to an engine that was established or taken from the idle ones.
//!
//! Carries what its exchange needs: the peer, by which pingora files idle connections, and whether it was reused, which
//! decides what a failure means (see `flow::exchange`).

use std::sync::Arc;

use pingora::protocols::Stream;
use pingora::upstreams::peer::HttpPeer;

/// A usable connection.
pub(super) struct Connected {
    pub(super) peer: Arc<HttpPeer>,
    pub(super) stream: Stream,
    /// It carried an earlier request.
    pub(super) reused: bool,
}
