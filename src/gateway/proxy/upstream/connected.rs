//! A new or reused connection to an engine.
//!
//! It also holds the peer, which is the key of pingora's pool of idle connections, and whether it was reused, which decides
//! how a failure is handled (see `flow::exchange`).

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
